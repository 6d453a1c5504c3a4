"""Hydra, asked before it runs: every job of a command line is composed and checked."""

import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from co2.errors import ConfigError, nearest, require

_OPTUNA = "hydra/sweeper=optuna"
_PLUGINS = (
    ("hydra/launcher=submitit_slurm", "submitit", "slurm", "launches"),
    (_OPTUNA, "optuna", "optuna", "chooses"),
)
"""Override, package, extra of pyproject.toml, what it does."""
_GROUPS = ("task", "method", "scale")


def preflight(
    folder: Path,
    name: str,
    arguments: Sequence[str],
    check: Callable[[DictConfig, list[str]], object],
) -> None:
    """Compose every job that the command line asks for, and `check(cfg, overrides)` each.

    Args:
        folder, name: of Hydra's configuration.
        arguments: the command line, without the program.
        check: raises `ConfigError` for a job that must not start.
    Raises:
        ConfigError: for the first job that cannot be composed, or that `check` refuses.
    """
    given = get_args_parser().parse_args(list(arguments))
    if given.help or given.hydra_help or given.cfg or given.info or given.shell_completion:
        return  # Hydra answers these itself and starts nothing
    _check_plugins(given.overrides, given.multirun)
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        for overrides in jobs(given.overrides, given.multirun):
            check(_compose(name, overrides), overrides)


def _check_plugins(overrides: Sequence[str], multirun: bool) -> None:
    """Those of Hydra that are extras of ours."""
    for plugin, package, extra, does in _PLUGINS:
        if plugin in overrides:
            key, _, value = plugin.partition("=")
            require(multirun, key, value, f"{does} the jobs of a sweep; add -m")
            there = find_spec(package) is not None
            require(there, key, value, f"is an extra; pip install -e '.[{extra}]'")
            # That a file of ours sets values of the extra's own options is what we want.
            warnings.filterwarnings("ignore", message=r"(?s).*validated against ConfigStore schema")


def composed(folder: Path, name: str, overrides: Sequence[str]) -> DictConfig:
    """The configuration of one job. Raises `ConfigError`."""
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        return _compose(name, list(overrides))


def jobs(overrides: list[str], multirun: bool) -> Iterator[list[str]]:
    """The overrides of every job: of a sweep, all combinations of its choices. Of an interval, in
    which only optuna's sweeper chooses, the two ends.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        # The first line holds the reason; the override itself follows "parsing override".
        text = str(error).splitlines()[0]
        wrong = re.search(r"parsing override '(.*?)'", str(error))
        key, _, value = (wrong.group(1) if wrong else "command line").partition("=")
        raise ConfigError(key, value, f"not an override that Hydra can read ({text})") from None
    choices = []
    for override in parsed:
        if override.is_sweep_override():
            key = override.get_key_element()
            if not multirun:
                raise ConfigError(
                    key, override.get_value_string(), "several values; add -m for a sweep"
                )
            if override.is_interval_sweep():
                hint = f"an interval needs {_OPTUNA}"
                require(_OPTUNA in overrides, key, override.get_value_string(), hint)
                span = override.value()
                assert isinstance(span, IntervalSweep)
                choices.append([f"{key}={span.start}", f"{key}={span.end}"])
                continue
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([str(override.input_line)])
    for job in itertools.product(*choices):
        yield list(job)


def _compose(name: str, overrides: list[str]) -> DictConfig:
    try:
        return compose(name, overrides)
    except MissingConfigException as error:
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        if group == "task/scale":  # `<task>_<scale>`, picked by the two together
            task, _, scale = option.rpartition("_")
            names = (name.rpartition("_") for name in error.options or [])
            scales = sorted(end for begin, _, end in names if begin == task)
            hint = f"task={task} has no such scale; it has {', '.join(scales)}"
            raise ConfigError("scale", scale, hint) from None
        hint = "no such option; " + nearest(option, error.options or [])
        raise ConfigError(group or "config", option, hint) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise _unknown_key(name, overrides, error) from None
    except ValueError as error:  # Hydra, where a group is given something that is no option
        for override in overrides:
            key, _, value = override.partition("=")
            if not key:
                raise ConfigError(key, value, "a key is missing before the =") from None
            if key in _GROUPS and (value == "null" or not value.isidentifier()):
                options = GlobalHydra.instance().config_loader().get_group_options(key)
                hint = f"must be one of {', '.join(options)}"
                raise ConfigError(key, value, hint) from None
        raise ConfigError("configuration", "", str(error).splitlines()[0]) from None


def _unknown_key(name: str, overrides: list[str], error: Exception) -> ConfigError:
    """An override of a key that is not there, with the nearest one that is."""
    text = str(error)
    found = re.search(
        r"Could not (?:override|append to config|delete from config).*?'([\w./@+~-]+)", text
    )
    if not found:
        return ConfigError("configuration", "", text.splitlines()[0])
    key = found.group(1).partition("=")[0].lstrip("+~")
    value = next(
        (o.partition("=")[2] for o in overrides if o.lstrip("+~").partition("=")[0] == key), ""
    )
    groups = [
        o
        for o in overrides
        if "." not in o.partition("=")[0] and o.lstrip("+~") != f"{key}={value}"
    ]
    try:
        known = _leaves(compose(name, groups))
    except (HydraException, OmegaConfBaseException):
        return ConfigError(key, value, text.splitlines()[0])
    node, _, last = key.rpartition(".")
    nodes = {leaf.partition(".")[0] for leaf in known}
    same = sorted(leaf for leaf in known if leaf.rpartition(".")[2] == last)
    if node not in nodes and same:
        hint = "did you mean " + " or ".join(same) + "?"
    else:
        hint = nearest(key, known if node in nodes else nodes)
    where = f"there is no {node} here; " if node and node not in nodes else "unknown key; "
    return ConfigError(key, value, where + hint)


def _leaves(cfg: DictConfig) -> set[str]:
    plain = OmegaConf.to_container(cfg)

    def walk(values: object, path: str) -> Iterator[str]:
        if isinstance(values, dict) and values:
            for key, value in values.items():
                yield from walk(value, f"{path}.{key}" if path else str(key))
        else:
            yield path

    return set(walk(plain, ""))
