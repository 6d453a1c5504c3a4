"""`tuned=true`: the settings that won in `python -m recipes tune TASK METHOD`.

They lie in conf/tuned/<task>/<method>.yaml, win over defaults and recipes, and lose to what the
user gives. What a comparison is about is not tuned: τ, averaged moments and the gap penalty. Where
these are not the defaults, or the scale is not smoke, the name of the file says so:
co2_tau48_average_moments_gap_aware_paper.yaml.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from co2.app.compose import Values, key_of, unreadable
from co2.app.schema import schema
from co2.errors import require
from co2.program import python
from co2.record.metrics import flat

Settings = dict[str, object]
"""By full name, as on the command line: `co2.outer_lr` → 0.7."""
MOMENTS, GAP = "average_moments", "gap_penalty"


@dataclass(frozen=True)
class Tuned:
    """What is tuned as one: a task and method, at a scale, with some of its settings given."""

    task: str
    method: str
    scale: str
    node: Mapping[str, object]
    """The method's settings by key, as composed. A key that it lacks has its default."""
    defaults: type
    """The `Config` of the method."""

    @property
    def file(self) -> Path:
        """Where the settings lie below conf, whether or not there are any."""
        tau, moments, gap = self._given()
        words = [self.method, f"tau{tau}" if tau else "", MOMENTS if moments else ""]
        words += [f"gap_{gap.removeprefix('gap_')}" if gap else ""]
        words += [self.scale] if self.scale != "smoke" else []
        return Path("tuned", self.task, f"{'_'.join(filter(None, words))}.yaml")

    def command(self, trials: int | None = None) -> str:
        """The command that writes this file, behind the name of a Python."""
        tau, moments, gap = self._given()
        words = ["-m recipes tune", self.task, self.method]
        words += [f"--tau {tau}"] if tau else []
        words += ["--average-moments"] if moments else []
        words += [f"--gap-penalty {gap}"] if gap else []
        words += [f"--scale {self.scale}"] if self.scale != "smoke" else []
        words += [f"--trials {trials}"] if trials is not None else []
        return " ".join(words)

    def settings(self, conf: Path) -> Settings:
        """What won. Raises `ConfigError` if nothing has been tuned.

        Args:
            conf: folder of Hydra's configuration.
        """
        path, place = conf / self.file, f"task={self.task} method={self.method}"
        hint = f"{place} has no {path.name} in conf/tuned/{self.task}; make it: "
        require(path.exists(), "tuned", "true", f"{hint}{python()} {self.command()}")
        try:
            return flat(OmegaConf.to_container(OmegaConf.load(path)))  # type: ignore[arg-type]
        except yaml.YAMLError as error:
            raise unreadable("tuned", "true", error) from None

    def _given(self) -> tuple[str, bool, str]:
        """τ and the gap penalty, or nothing where they are the method's defaults; and whether
        moments are averaged too."""
        tau, gap = map(self._unusual, ("tau", GAP))
        return tau, str(self.node.get(MOMENTS)).lower() == "true", gap

    def _unusual(self, key: str) -> str:
        """The value of a key; nothing where it is the method's default."""
        default = str(getattr(self.defaults, key, None))
        own = str(self.node.get(key, default))
        return "" if own == default else own


def with_tuned(
    conf: Path, values: Values, overrides: Sequence[str], methods: Mapping[str, type]
) -> tuple[Values, tuple[str, ...]]:
    """Values without the key `tuned`, which has done its part, and the overrides that name the
    run's folder: with tuned settings these are among them, so that another winner is another run.

    Args:
        conf: folder of Hydra's configuration.
        values: as composed.
        overrides: `key=value` as given on the command line.
        methods: classes with a dataclass `Config`, by name.
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
    place = Tuned(task, method, scale, node, schema(methods[method]))
    keys, words = {key_of(word) for word in given}, []
    for name, value in place.settings(conf).items():
        group, _, key = name.partition(".")
        if keys.isdisjoint((name, group)):
            own[group] = {**own.get(group, {}), key: value}
            words.append(f"{name}={value}")
    return own, (*words, *given, "settings=tuned")
