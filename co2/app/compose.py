"""Hydra's part: from a command line to the plain values of every run that it asks for.

Only Hydra's public interface is used: its Compose API, `hydra.core` and `hydra.errors`. Whatever it
raises leaves this module as a `ConfigError`.
"""

import argparse
import contextlib
import copy
import itertools
import re
import shlex
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from co2.app.schema import RENAMED, unknown
from co2.errors import ConfigError, first_line, nearest, require

Checked = TypeVar("Checked")
Values = dict[str, Any]
"""A composed configuration: resolved, in plain dictionaries and lists. `Any`: it is not checked."""

_OPTUNA = "hydra/sweeper=optuna"
_PLUGINS = (
    ("hydra/launcher=submitit_slurm", "submitit", "slurm", "launches"),
    (_OPTUNA, "hydra_plugins.hydra_optuna_sweeper", "optuna", "chooses"),
)
"""Override, package, extra of pyproject.toml, what it does."""
_GROUPS = ("task", "method", "scale", "tuned")
_TRUTH = ("true", "false")
_ASKS = (
    *("-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "--resolve", "-p", "--package"),
    *("-i", "--info", "-sc", "--shell-completion"),
)
"""Flags that Hydra answers itself. With its others it reads a configuration, or a pickle, from
elsewhere."""
_PLAIN_KEY = re.compile(r"(?!hydra\b)\w+(\.\w+)*")
_OF_HYDRA = ("launcher", "sweeper", "sweep", "run", "job", "verbose")
"""Groups of Hydra's own options that a command line may set. Its others name code: callbacks,
handlers of logs, search paths."""
HYDRA_ERRORS = (HydraException, OmegaConfBaseException)


@dataclass(frozen=True)
class CommandLine:
    """The arguments of train.py, as far as they need to be understood before Hydra reads them."""

    overrides: tuple[str, ...]
    sweep: bool
    """Whether -m was given: a launcher and a sweeper of Hydra start the runs."""
    flags: tuple[str, ...]
    """Every other flag, such as --cfg; Hydra answers those itself."""

    @property
    def hydra_runs(self) -> bool:
        """Whether Hydra starts the run: that of a sweep, or one with options of Hydra's own."""
        return self.sweep or any(_of_hydra(override) for override in self.overrides)


def command_line(arguments: Sequence[str]) -> CommandLine:
    """Read the arguments of train.py.

    Raises:
        ConfigError: a flag amid the overrides or one that is not known, or an override that would
            have Hydra read or run what is not this program's.
    """
    for word in arguments:
        _require_harmless(word)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-r", "--run", action="store_true")  # what happens without it, too
    known, others = parser.parse_known_args(list(arguments))
    flags = tuple(word for word in others if word.startswith("-"))
    if flags:
        return CommandLine((), known.multirun, flags)
    if others:
        first = arguments.index(others[0])
        together = list(arguments[first : first + len(others)]) == others
        require(together, "command line", "", "flags such as -m stand before the overrides")
    return CommandLine(tuple(others), known.multirun, ())


def _require_harmless(word: str) -> None:
    """Raise `ConfigError` for an argument by which Hydra would read or run what is elsewhere."""
    key, _, value = word.lstrip("+~").partition("=")
    try:
        word.encode()
    except UnicodeEncodeError:
        raise ConfigError(key, value, "is no UTF-8 text") from None
    if word.startswith("-"):
        good = key in (*_ASKS, "-m", "--multirun", "-r", "--run")
        hint = (
            "no such flag; a configuration is read from conf/ only, and keys are given as key=value"
        )
        require(good and (key in _ASKS or not value), key, value, hint)
    within = re.match(r"hydra(?:[./@]([\w-]*)|$)", key)
    if within:
        hint = f"of Hydra's own options only these can be set: {', '.join(_OF_HYDRA)}"
        require(within.group(1) in _OF_HYDRA, key, value, hint)
    hint = "names code to run; a launcher or a sweeper is chosen by hydra/launcher=NAME"
    require("_target_" not in word or not _of_hydra(word), key, value, hint)
    hint = "differs between the workers, and between a run and its next start; give a name"
    require("${now:" not in word or within is not None, key, value, hint)


def preflight(
    folder: Path,
    name: str,
    arguments: Sequence[str],
    check: Callable[[Values, list[str]], Checked],
) -> list[Checked]:
    """Compose every run that the command line asks for, and `check(values, overrides)` each.

    Args:
        folder, name: of Hydra's configuration.
        arguments: the command line, without the program.
        check: raises `ConfigError` for a run that must not start.
    Returns:
        What `check` made of each; nothing where Hydra answers the command line itself.
    Raises:
        ConfigError: for the first run that cannot be composed, or that `check` refuses.
    """
    line = command_line(arguments)
    if line.flags:
        return []
    _check_plugins(line.overrides, line.sweep)
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        return [
            check(_compose(folder, name, overrides), _without_hydra(overrides))
            for overrides in jobs(line.overrides, line.sweep)
        ]


def composed(folder: Path, name: str, overrides: Sequence[str]) -> Values:
    """The configuration of one run. Raises `ConfigError`."""
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        return _compose(folder, name, list(overrides))


def quoted(override: str) -> str:
    """`tuned=true` as Hydra can read it: conf/tuned is a group, whose options have names only."""
    key, sign, value = override.partition("=")
    if key != "tuned":
        return override
    words = (f"'{word.lower()}'" if word.lower() in _TRUTH else word for word in value.split(","))
    return key + sign + ",".join(words)


def key_of(override: str) -> str:
    """The key that an override sets."""
    return override.lstrip("+~").partition("=")[0]


def plain(config: DictConfig) -> Values:
    """What Hydra composed, with interpolations resolved. Raises `ConfigError`."""
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "configuration"
        raise ConfigError(key, "", first_line(error)) from None
    return {str(key): value for key, value in dict(values).items()}  # type: ignore[arg-type]


def refusal(error: Exception) -> ConfigError:
    """An error of Hydra or OmegaConf as one line."""
    if isinstance(error, MissingConfigException):
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        if group == "task/scale":  # `<task>_<scale>`, picked by the two together
            task, _, scale = option.rpartition("_")
            names = (name.rpartition("_") for name in error.options or [])
            scales = sorted(end for begin, _, end in names if begin == task)
            hint = f"task={task} has no such scale; it has {', '.join(scales)}"
            return ConfigError("scale", scale, hint)
        hint = "no such option; " + nearest(option, error.options or [])
        return ConfigError(group or "config", option, hint)
    return ConfigError("configuration", "", first_line(error))


def unreadable(key: str, value: object, error: yaml.YAMLError) -> ConfigError:
    """A YAML file that holds no plain values as one line; nothing of it has been made."""
    place = getattr(error, "problem_mark", None)
    where = f"{place.name}, line {place.line + 1}: " if place else ""
    problem = getattr(error, "problem", None) or "cannot be read"
    return ConfigError(key, value, f"{where}{problem}; YAML of plain values is needed")


def _of_hydra(override: str) -> bool:
    """Whether an override is of Hydra's own options, which are no part of a run."""
    return override.lstrip("+~").startswith(("hydra.", "hydra/"))


def _without_hydra(overrides: Sequence[str]) -> list[str]:
    return [override for override in overrides if not _of_hydra(override)]


def _check_plugins(overrides: Sequence[str], multirun: bool) -> None:
    """Refuse plugins of Hydra that are not installed, or that have nothing to do. `ConfigError`."""
    for plugin, package, extra, does in _PLUGINS:
        if plugin in overrides:
            key, _, value = plugin.partition("=")
            require(multirun, key, value, f"{does} the jobs of a sweep; add -m")
            # find_spec fails where the package around the one that it looks for is missing.
            whole = package.partition(".")[0]
            there = find_spec(whole) is not None and find_spec(package) is not None
            where = f"pip install -e '.[{extra}]', or 'co2-suite[{extra}]' outside a clone"
            require(there, key, value, f"needs an extra: {where}")
            # That a file of ours sets values of the extra's own options is what we want.
            warnings.filterwarnings("ignore", message=r"(?s).*validated against ConfigStore schema")


def jobs(overrides: Sequence[str], multirun: bool) -> Iterator[list[str]]:
    """The overrides of every run: in a sweep, all combinations of its values.

    Of an interval, in which only optuna's sweeper chooses, the two ends stand for all values.

    Raises:
        ConfigError: for what Hydra cannot read, and for several values without a sweep.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as error:
        raise _unreadable_override(error.override, overrides) from None
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


def _unreadable_override(override: str, overrides: Sequence[str]) -> ConfigError:
    """An override that Hydra's grammar does not have, with the quotes that would make it one."""
    key, sign, value = override.partition("=")
    hint = "is not key=value"
    if not sign:
        before = overrides[max(0, overrides.index(override) - 1)]
        if "=" in before:
            whole, _, begin = before.partition("=")
            hint += (
                f"; a value with a space stands in quotes: {_in_quotes(whole, f'{begin} {key}')}"
            )
        return ConfigError(key, value, hint)
    if value.startswith("~"):
        return ConfigError(key, value, "no shell expands a ~ here; write $HOME")
    hint = "cannot be read; give key=value"
    with contextlib.suppress(HydraException):
        OverridesParser.create().parse_override(f"{key}='{value}'")
        hint = f"has a character that needs two pairs of quotes: {_in_quotes(key, value)}"
    return ConfigError(key, value, hint)


def _in_quotes(key: str, value: str) -> str:
    """An override as a shell and Hydra read it: the outer quotes are the shell's."""
    word = f"{key}='{value}'"
    return shlex.quote(word) if set(word) & set('"$`\\') else f'"{word}"'


def _compose(folder: Path, name: str, overrides: list[str]) -> Values:
    overrides = [quoted(override) for override in overrides]
    try:
        config = _with_values(folder, name, overrides)
    except MissingConfigException as error:
        raise refusal(error) from None
    except HYDRA_ERRORS as error:
        raise _unknown_key(name, overrides, error) from None
    except yaml.YAMLError as error:
        raise unreadable("configuration", "", error) from None
    except ValueError as error:  # Hydra, where a group is given something that is no option
        for override in overrides:
            key, _, value = override.partition("=")
            if not key:
                raise ConfigError(key, value, "a key is missing before the =") from None
            if key in _GROUPS and (value == "null" or not value.isidentifier()):
                options = GlobalHydra.instance().config_loader().get_group_options(key)
                hint = f"must be one of {', '.join(options)}"
                raise ConfigError(key, value, hint) from None
        raise refusal(error) from None
    return plain(config)


def _with_values(folder: Path, name: str, overrides: list[str]) -> DictConfig:
    """What Hydra composes, in a seventh of its time where an earlier run had the same options of
    groups. As Hydra does, the values are set in their order once the groups are composed."""
    options: list[str] = []
    values: list[str] = []
    for override in overrides:
        key = override.partition("=")[0]
        if not _PLAIN_KEY.fullmatch(key):
            return compose(name, overrides)
        (options if (folder / key).is_dir() else values).append(override)
    try:
        parsed = OverridesParser.create().parse_overrides(values)
        if not any(value.is_sweep_override() for value in parsed):
            config = copy.deepcopy(_chosen(folder, _dates(folder), name, tuple(options)))
            for value in parsed:
                OmegaConf.update(config, value.key_or_group, value.value(), merge=True)
            return config
    except HYDRA_ERRORS:
        pass  # Hydra's own message names what is wrong
    return compose(name, overrides)


@lru_cache(maxsize=64)
def _chosen(
    folder: Path, dates: frozenset[tuple[str, int]], name: str, options: tuple[str, ...]
) -> DictConfig:
    """What Hydra composes of these options of groups, in files of these dates."""
    return compose(name, list(options))


def _dates(folder: Path) -> frozenset[tuple[str, int]]:
    """Every file of a configuration and when it was written, in nanoseconds."""
    return frozenset((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*.yaml"))


def _unknown_key(name: str, overrides: list[str], error: Exception) -> ConfigError:
    """An override of a key that is not there, with the nearest one that is."""
    text = str(error)
    found = re.search(
        r"Could not (?:override|append to config|delete from config).*?'([\w./@+~-]+)", text
    )
    if not found:
        return refusal(error)
    key = found.group(1).partition("=")[0].lstrip("+~")
    value = next(
        (o.partition("=")[2] for o in overrides if o.lstrip("+~").partition("=")[0] == key), ""
    )
    if key in RENAMED:
        return ConfigError(key, value, unknown(key, ()))
    groups = [
        o
        for o in overrides
        if "." not in o.partition("=")[0] and o.lstrip("+~") != f"{key}={value}"
    ]
    try:
        known = _leaves(compose(name, groups))
    except HYDRA_ERRORS:
        return ConfigError(key, value, first_line(error))
    node, _, last = key.rpartition(".")
    nodes = {leaf.partition(".")[0] for leaf in known}
    same = sorted(leaf for leaf in known if leaf.rpartition(".")[2] == last)
    own = [leaf for leaf in known if leaf.startswith(f"{node}.")]
    if same:
        hint = "did you mean " + " or ".join(same) + "?"
    elif node in nodes:
        hint = nearest(key, own) if own else f"{node} has no keys"
    else:
        hint = nearest(key, nodes)
    where = f"there is no {node} here; " if node and node not in nodes else "unknown key; "
    return ConfigError(key, value, where + hint)


def _leaves(config: DictConfig) -> set[str]:
    """The full names of all keys."""

    def walk(values: object, path: str) -> Iterator[str]:
        if isinstance(values, dict) and values:
            for key, value in values.items():
                yield from walk(value, f"{path}.{key}" if path else str(key))
        else:
            yield path

    return set(walk(OmegaConf.to_container(config), ""))
