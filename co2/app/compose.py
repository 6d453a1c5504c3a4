"""Hydra's part: from a command line to the plain values of every run that it asks for.

Only Hydra's public interface is used. Whatever it raises leaves this module as a `ConfigError`.
"""

import contextlib
import copy
import itertools
import re
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from co2.app.schema import PLAIN, defaults, schema
from co2.config import NODES, Config
from co2.errors import ConfigError, extra, first_line, is_utf8, nearest, require
from co2.methods import Method
from co2.record.folder import plain_values

Checked = TypeVar("Checked")
Values = dict[str, Any]
"""A composed configuration: resolved, in plain dictionaries and lists. `Any`: it is not checked."""

_OPTUNA = "hydra/sweeper=optuna"
_PLUGINS = (
    ("hydra/launcher=submitit_slurm", "submitit", "slurm", "launches"),
    (_OPTUNA, "hydra_plugins.hydra_optuna_sweeper", "optuna", "chooses"),
)
"""Override, package, extra of pyproject.toml, what it does."""
_GROUPS = ("task", "method", "scale", "tuned", "experiment", "debug")
_ASKS = (
    *("-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "--resolve", "-p", "--package"),
    *("-i", "--info", "-sc", "--shell-completion"),
)
"""Flags that Hydra answers itself. Its other flags are refused: they read a configuration, or a
pickle, from elsewhere."""
_CFG = {"-c", "--cfg"}
_SHOWS = {*_CFG, "-i", "--info"}
_OF_CFG = {"--resolve", "-p", "--package"}
SWEEP = ("-m", "--multirun")
_STARTS = (*SWEEP, "-r", "--run")
_OF_HYDRA = ("launcher", "sweeper", "sweep", "run", "job", "verbose")
"""Groups of Hydra's own options that a command line may set. Its others name code: callbacks,
handlers of logs, search paths."""
HYDRA_ERRORS = (HydraException, OmegaConfBaseException)


@dataclass(frozen=True)
class CommandLine:
    """The arguments of train.py, as far as they need to be understood before Hydra reads them."""

    overrides: tuple[str, ...]
    sweep: bool
    """Whether -m was given."""
    flags: tuple[str, ...]
    """Every other flag, such as --cfg, which Hydra answers itself."""

    @property
    def through_hydra(self) -> bool:
        """Whether the whole is Hydra's: flags that it answers, or options of its own, such as
        another launcher or sweeper."""
        return bool(self.flags) or any(map(_of_hydra, self.overrides))


def command_line(arguments: Sequence[str]) -> CommandLine:
    """Read the arguments of train.py. Raises `ConfigError` for a flag amid the overrides or one
    that is not known, and for what would have Hydra read or run what is not this program's."""
    for word in arguments:
        _require_harmless(word)
    words = tuple(word for word in arguments if not word.startswith("-"))
    asks = tuple(word for word in arguments if word.startswith("-") and word not in _STARTS)
    first = arguments.index(words[0]) if words else 0
    together = tuple(arguments[first : first + len(words)]) == words
    hint = "flags such as -m stand before the overrides"
    require(together or asks != (), "command line", "", hint)
    sweep = not {*SWEEP}.isdisjoint(arguments)
    flags = {word.partition("=")[0] for word in asks}
    for flag in sorted(flags & _SHOWS) if sweep else ():
        raise ConfigError(flag, "", "shows one run; leave out -m and give each key one value")
    for flag in sorted(flags & _OF_CFG if flags.isdisjoint(_CFG) else ()):
        raise ConfigError(flag, "", "goes with --cfg job only")
    return CommandLine(words, sweep, asks)


def _require_harmless(word: str) -> None:
    """Raise `ConfigError` for an argument by which Hydra would read or run what is elsewhere."""
    key, _, value = word.lstrip("+~").partition("=")
    within = re.match(r"hydra(?:[./@]([\w-]*)|$)", key)
    if not is_utf8(word):
        hint = "is no UTF-8 text"
    elif word.startswith("-") and key not in _ASKS and word not in _STARTS:
        hint = "no such flag; a configuration is read from conf/ only, and keys are given as "
        hint += "key=value"
    elif within and within.group(1) not in _OF_HYDRA:
        hint = f"of Hydra's own options only these can be set: {', '.join(_OF_HYDRA)}"
    elif "_target_" in word and _of_hydra(word):
        hint = "names code to run; a launcher or a sweeper is chosen by hydra/launcher=NAME"
    elif "${now:" in word and not within:
        hint = "differs between the workers, and between a run and its next start; give a name"
    else:
        return
    raise ConfigError(key, value, hint)


def offer(tasks: Mapping[str, type], methods: Mapping[str, type[Method]]) -> None:
    """Register the schemas with Hydra: every key of the root with its default, and the `Config` of
    each task and method as an option of these groups. What a method `needs` is a group of its own,
    because it wins over the task's recipe."""
    known = ConfigStore.instance()
    declared = defaults(Config)
    keys = {name: declared[name] for name in (*PLAIN, *NODES) if name in declared}
    known.store("keys", plain_values(keys))
    for group, options in (("task", tasks), ("method", methods)):
        for name, kind in options.items():
            values = plain_values({group: name, name: defaults(schema(kind))})
            known.store(name, values, group=group, package="_global_")
    for name, method in methods.items():
        needs = OmegaConf.from_dotlist(list(method.needs))
        known.store(name, needs, group="method/needs", package="_global_")


def scored_apart(arguments: Sequence[str]) -> list[str]:
    """The arguments of train.py. A search gets data.validation=tuning unless they set it: settings
    are not chosen on the samples that are reported."""
    words = list(arguments)
    if _OPTUNA in words and {"data", "data.validation"}.isdisjoint(map(key_of, words)):
        words.insert(words.index(_OPTUNA), "data.validation=tuning")  # beside it: flags may follow
    return words


def preflight(
    folder: Path, arguments: Sequence[str], check: Callable[[Values, list[str]], Checked]
) -> list[Checked]:
    """What `check(values, overrides)` makes of every run that the command line asks for; nothing
    where Hydra answers the command line itself.

    Args:
        folder: of Hydra's configuration.
        arguments: the command line, without the program.
    Raises:
        ConfigError: for the first run that cannot be composed, or that `check` refuses.
    """
    line = command_line(arguments)
    if line.flags:
        return []
    _check_plugins(line.overrides, line.sweep)
    runs = jobs(line.overrides) if line.sweep else [list(line.overrides)]
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        return [
            check(_compose(folder, words), [word for word in words if not _of_hydra(word)])
            for words in runs
        ]


def composed(folder: Path, overrides: Sequence[str]) -> Values:
    """The configuration of one run. Raises `ConfigError`."""
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        return _compose(folder, overrides)


def quoted(override: str) -> str:
    """`tuned=true` as Hydra can read it: conf/tuned is a group, whose options have names only; and
    `+debug=default` without its +, which Hydra wants for groups that have no default only."""
    if key_of(override) in _GROUPS:
        override = override.lstrip("+")
    key, sign, value = override.partition("=")
    if key != "tuned":
        return override
    truth = ("true", "false")
    words = (f"'{word.lower()}'" if word.lower() in truth else word for word in value.split(","))
    return key + sign + ",".join(words)


def of_the_choice(values: Values, options: Iterable[str], overrides: Sequence[str]) -> Values:
    """Values without an experiment's settings of tasks and methods that were not chosen, as in
    `experiment=gpt2_slow_link method=slowmo`. What `overrides` set stays, and is refused later.

    Args:
        options: names of all tasks and methods.
    """
    kept, given = dict(values), set(map(key_of, overrides))
    for name in set(options) - {values.get("task"), values.get("method")}:
        node = kept.pop(name, None)
        if name in given:
            kept[name] = node
        elif own := {key: node[key] for key in node or () if f"{name}.{key}" in given}:
            kept[name] = own
    return kept


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


def _check_plugins(overrides: Sequence[str], multirun: bool) -> None:
    """Refuse plugins of Hydra that are not installed, or that have nothing to do. `ConfigError`."""
    for plugin, package, own, does in _PLUGINS:
        if plugin in overrides:
            key, _, value = plugin.partition("=")
            require(multirun, key, value, f"{does} the jobs of a sweep; add -m")
            # find_spec fails where the package around the one that it looks for is missing.
            there = all(map(find_spec, (package.partition(".")[0], package)))
            require(there, key, value, extra(own))
            here = package != "submitit" or shutil.which("sbatch") is not None
            require(here, key, value, "there is no sbatch here; start it where SLURM is")
            # Hydra warns that conf/hydra sets options of the plugin, which is what we want.
            warnings.filterwarnings("ignore", message=r"(?s).*validated against ConfigStore schema")


def jobs(overrides: Sequence[str]) -> Iterator[list[str]]:
    """The overrides of every run of a sweep: all combinations of its values. Of an interval, in
    which only optuna's sweeper chooses, the two ends stand for all. Raises `ConfigError`."""
    choices = []
    for override in _parsed(overrides):
        key, value = override.get_key_element(), override.value()
        if isinstance(value, IntervalSweep):
            hint = f"an interval needs {_OPTUNA}"
            require(_OPTUNA in overrides, key, override.get_value_string(), hint)
            choices.append([f"{key}={value.start}", f"{key}={value.end}"])
        elif override.is_sweep_override():
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([str(override.input_line)])
    yield from map(list, itertools.product(*choices))


def sweep_job(index: str, overrides: Sequence[str]) -> list[str]:
    """The overrides of one run of a sweep, by its number: what slurm/sweep.sbatch trains in one
    task of an array. Raises `ConfigError`."""
    found = list(jobs(overrides))
    last = len(found) - 1
    hint = f"the sweep has the jobs 0 to {last}: sbatch --array=0-{last} …"
    good = index.isdecimal() and int(index) <= last
    require(good, "SLURM_ARRAY_TASK_ID", index, hint)
    return found[int(index)]


def _parsed(overrides: Sequence[str]) -> list[Override]:
    """The overrides as Hydra reads them. Raises `ConfigError`."""
    try:
        return OverridesParser.create().parse_overrides(list(map(quoted, overrides)))
    except OverrideParseException as error:
        raise _unreadable_override(error.override, overrides) from None


def _unreadable_override(override: str, overrides: Sequence[str]) -> ConfigError:
    """An override that Hydra's grammar does not have, with the quotes that would make it one."""
    key, sign, value = override.partition("=")
    if not sign:
        hint = "is not key=value"
        whole, cut, begin = overrides[max(0, overrides.index(override) - 1)].partition("=")
        if cut:
            word = _in_quotes(whole, f"{begin} {key}")
            hint += f"; a value with a space stands in quotes: {word}"
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


def _compose(folder: Path, overrides: Sequence[str]) -> Values:
    """Compose the options of groups, then set the values in their order, as Hydra does. Unknown
    keys pass: `typed` refuses them. Raises `ConfigError`."""
    options: list[str] = []
    values: list[Override] = []
    for override in _parsed(overrides):
        key, value = override.key_or_group, override.value()
        require(not override.is_delete(), key, "", "is needed; give it another value")
        text = override.get_value_string()
        require(key != "", key, text, "a key is missing before the =")
        require(not override.is_sweep_override(), key, text, "several values; add -m for a sweep")
        if key in _GROUPS and not (isinstance(value, str) and value.isidentifier()):
            known = GlobalHydra.instance().config_loader().get_group_options(key)
            raise ConfigError(key, text, nearest(text, known))
        line = str(override.input_line)
        if key in _GROUPS or "/" in key or override.package or _of_hydra(line):
            options.append(line)
        else:
            values.append(override)
    try:
        config = copy.deepcopy(_chosen(folder, tuple(options)))
        for override in values:
            OmegaConf.update(config, override.key_or_group, override.value(), force_add=True)
    except (*HYDRA_ERRORS, ValueError) as error:
        raise refusal(error) from None
    except yaml.YAMLError as error:
        raise unreadable("configuration", "", error) from None
    return plain(config)


@lru_cache(maxsize=64)
def _chosen(folder: Path, options: tuple[str, ...]) -> DictConfig:
    """What Hydra composes of these options of groups, in a tenth of a second."""
    return compose("config", list(options))
