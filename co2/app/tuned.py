"""`tuned=true`: the settings that won in `python -m recipes tune TASK METHOD`.

They lie in conf/tuned/<task>/<method>.yaml, win over defaults and recipes, and lose to what the
user gives. What a comparison is about is not tuned: τ, averaged moments and the gap penalty. Where
these are not the defaults, or the scale is not smoke, the name of the file says so:
co2_tau48_average_moments_gap_aware_paper.yaml.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from co2.app.compose import Values, key_of, unreadable
from co2.errors import require
from co2.program import python
from co2.record.metrics import flat
from co2_measure.peers import known_methods

Settings = dict[str, object]
"""By full name, as on the command line: `co2.outer_lr` → 0.7."""
Node = Mapping[str, object]
"""The method's settings by key, as composed. A key that it lacks has its default."""
MOMENTS, GAP = "average_moments", "gap_penalty"


def with_tuned(
    conf: Path, values: Values, overrides: Sequence[str]
) -> tuple[Values, tuple[str, ...]]:
    """Values without the key `tuned`, which has done its part, and the overrides that name the
    run's folder: with tuned settings these are among them, so that another winner is another run.

    Args:
        conf: folder of Hydra's configuration.
        values: as composed.
        overrides: `key=value` as given on the command line.
    Raises:
        ConfigError: if nothing has been tuned for this task, method, τ, moments and scale.
    """
    own = {key: value for key, value in values.items() if key != "tuned"}
    given = tuple(word for word in overrides if key_of(word) != "tuned")
    if not values.get("tuned"):
        return own, given
    task, method, scale = (str(values[key]) for key in ("task", "method", "scale"))
    method_node = own.get(method)
    node = method_node if isinstance(method_node, dict) else {}
    keys, words = {key_of(word) for word in given}, []
    for name, value in tuned_settings(conf, task, method, scale, node).items():
        group, _, key = name.partition(".")
        if keys.isdisjoint((name, group)):
            own[group] = {**own.get(group, {}), key: value}
            words.append(f"{name}={value}")
    return own, (*words, *given, "settings=tuned")


def tuned_settings(conf: Path, task: str, method: str, scale: str, node: Node) -> Settings:
    """What won for this task and method. Raises `ConfigError` if nothing has been tuned."""
    path = tuned_file(conf, task, method, scale, node)
    command = f"{python()} {tune_command(task, method, scale, node)}"
    hint = f"task={task} method={method} has no {path.name} in conf/tuned/{task}; make it: "
    require(path.exists(), "tuned", "true", hint + command)
    return _read(path)


def is_tuned(conf: Path, task: str, method: str, scale: str, node: Node) -> bool:
    """Whether `tuned_settings` has any that are of the gap penalty of this node, which was tuned
    once. Raises `ConfigError` for a file that is none."""
    path = tuned_file(conf, task, method, scale, node)
    if not path.exists():
        return False
    usual = getattr(known_methods()[method].Config, GAP, None)
    own = str(node.get(GAP, usual))
    return str(_read(path).get(f"{method}.{GAP}", own)) == own


def _read(path: Path) -> Settings:
    try:
        return flat(OmegaConf.to_container(OmegaConf.load(path)))  # type: ignore[arg-type]
    except yaml.YAMLError as error:
        raise unreadable("tuned", "true", error) from None


def tuned_file(conf: Path, task: str, method: str, scale: str, node: Node) -> Path:
    """Where the settings of a task and method lie, whether or not there are any."""
    tau, moments, gap = _apart(method, node)
    words = [method, f"tau{tau}" if tau else "", MOMENTS if moments else ""]
    words += [f"gap_{gap.removeprefix('gap_')}" if gap else ""]
    words += [scale] if scale != "smoke" else []
    return conf / "tuned" / task / f"{'_'.join(filter(None, words))}.yaml"


def tune_command(task: str, method: str, scale: str, node: Node, trials: int | None = None) -> str:
    """The command that writes this file, behind the name of a Python."""
    tau, moments, gap = _apart(method, node)
    words = ["-m recipes tune", task, method]
    words += [f"--tau {tau}"] if tau else []
    words += ["--average-moments"] if moments else []
    words += [f"--gap-penalty {gap}"] if gap else []
    words += [f"--scale {scale}"] if scale != "smoke" else []
    words += [f"--trials {trials}"] if trials is not None else []
    return " ".join(words)


def _apart(method: str, node: Node) -> tuple[str, bool, str]:
    """τ and the gap penalty, or nothing where they are the method's defaults; and whether moments
    are averaged too."""
    tau, gap = (_other(method, node, key) for key in ("tau", GAP))
    return tau, str(node.get(MOMENTS)).lower() == "true", gap


def _other(method: str, node: Node, key: str) -> str:
    default = str(getattr(known_methods()[method].Config, key, None))
    value = str(node.get(key, default))
    return "" if value == default else value
