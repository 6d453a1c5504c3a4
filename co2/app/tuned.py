"""`tuned=true`: the settings that won in `python -m recipes tune TASK METHOD`.

They lie in conf/tuned/<task>/<method>.yaml, win over conf/method and conf/scale, and lose to what
the user gives. The name of the file says for which τ and at which scale they were chosen where that
is not conf's own τ or scale=smoke: co2_tau48_paper.yaml.
"""

from collections.abc import Sequence
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from co2.app.compose import Values, unreadable
from co2.errors import require

Settings = dict[str, object]
"""By full name, as on the command line: `co2.outer_lr` → 0.7."""


def with_tuned(
    conf: Path, values: Values, overrides: Sequence[str]
) -> tuple[Values, tuple[str, ...]]:
    """Values and overrides of a run, in which `tuned` has done its part.

    Args:
        conf: folder of Hydra's configuration.
        values: as composed, with the key `tuned`.
        overrides: `key=value` as given on the command line.
    Returns:
        The values, without that key, and the overrides that name the run's folder: with tuned
        settings these are among them, so that another winner is another run.
    Raises:
        ConfigError: if nothing has been tuned for this task, method, τ and scale.
    """
    own = {key: value for key, value in values.items() if key != "tuned"}
    given = [word for word in overrides if word.lstrip("+~").partition("=")[0] != "tuned"]
    if not values.get("tuned"):
        return own, tuple(given)
    task, method, scale = (str(values[key]) for key in ("task", "method", "scale"))
    settings = tuned_settings(conf, task, method, scale, _dict(values.get(method)).get("tau"))
    keys = {word.lstrip("+~").partition("=")[0] for word in given}
    left = {
        name: value
        for name, value in settings.items()
        if name not in keys and name.partition(".")[0] not in keys
    }
    for name, value in left.items():
        node, _, key = name.partition(".")
        own[node] = {**_dict(own.get(node)), key: value}
    words = [f"{name}={value}" for name, value in left.items()]
    return own, (*words, *given, "settings=tuned")


def tuned_settings(conf: Path, task: str, method: str, scale: str, tau: object) -> Settings:
    """What won for this task and method. Raises `ConfigError` if nothing has been tuned.

    Args:
        tau: of the run; None stands for conf's own.
    """
    path = tuned_file(conf, task, method, scale, tau)
    command = tune_command(conf, task, method, scale, tau)
    hint = (
        f"task={task} method={method} has no {path.name} in conf/tuned/{task}; make it: {command}"
    )
    require(path.exists(), "tuned", "true", hint)
    try:
        nodes = OmegaConf.to_container(OmegaConf.load(path))
    except yaml.YAMLError as error:
        raise unreadable("tuned", "true", error) from None
    return {
        f"{node}.{key}": value
        for node, keys in _dict(nodes).items()
        for key, value in _dict(keys).items()
    }


def tuned_file(conf: Path, task: str, method: str, scale: str, tau: object = None) -> Path:
    """Where the settings of a task and method lie, whether or not there are any."""
    parts = [method]
    parts += [f"tau{tau}"] if _own_tau(conf, method, tau) else []
    parts += [scale] if scale != "smoke" else []
    return conf / "tuned" / task / f"{'_'.join(parts)}.yaml"


def tune_command(
    conf: Path, task: str, method: str, scale: str, tau: object = None, trials: int | None = None
) -> str:
    """The command that writes this file."""
    words = ["python -m recipes tune", task, method]
    words += [f"--tau {tau}"] if _own_tau(conf, method, tau) else []
    words += [f"--scale {scale}"] if scale != "smoke" else []
    words += [f"--trials {trials}"] if trials is not None else []
    return " ".join(words)


def _own_tau(conf: Path, method: str, tau: object) -> bool:
    """Whether this τ is another than that of conf/method."""
    path = conf / "method" / f"{method}.yaml"
    default = _dict(yaml.safe_load(path.read_text()).get(method)).get("tau")
    return tau is not None and str(tau) != str(default)


def _dict(values: object) -> dict[str, object]:
    """A group of keys; an empty one where there is none."""
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}
