"""The folder of a run, and the check that a folder which exists holds the same run."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from co2.config import NODES, Config, Resume, Schedule
from co2.errors import ConfigError, require
from co2.record.files import CHECKPOINT_FORMAT
from co2.record.metrics import Summary
from co2.whole import nearest_existing, try_to_write

# Nodes and keys that may differ between two segments of one run.
_FREE = ("log", "checkpoint", "resume", "trace", "runs", "tag")
_ELASTIC = tuple(
    f"launch.{key}"
    for key in ("elastic", "min_replicas", "wait_s", "silent_s", "restarts", "store")
)
_LONG = 8
"""Characters of a number that goes into a folder name as it was given."""
_FREE_KEYS = (("data", "root"), ("data", "workers"), ("launch", "backend"), ("launch", "gpu"))
_GONE = {("train", "keep_global_batch"): (False, "train.global_batch")}
"""Keys that runs of earlier versions have: the value that changed nothing, and the key that there
is now."""
_OTHERWISE = "give this one a tag=NAME of its own, or start that one afresh with resume=never"


def run_folder(config: Config) -> Path:
    """`<runs>/<task>/<method>/<tag>/seed<k>`: the same on every worker and at every attempt."""
    path = Path(config.runs, config.task, config.method, config.tag, f"seed{config.train.seed}")
    return path.absolute()


def tag_from(overrides: Sequence[str], world: int, workers: int | None, method: str) -> str:
    """The overrides that matter, as a folder name: `co2.tau=3` → `tau3`; none → `default`.

    Args:
        overrides: `key=value` as given on the command line.
        world: number of processes.
        workers: `launch.workers` as composed, from which `world` may differ under torchrun.
        method: the chosen one, whose keys are written without its name.
    """
    parts = []
    elastic = "launch.elastic=true" in overrides
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        node = key.partition(".")[0]
        if (
            key in ("task", "method", "train.seed")
            or tuple(key.split(".")) in _FREE_KEYS
            or key in _ELASTIC
            or (elastic and key == "launch.workers")
            or override == "launch.workers=null"
            or node in (*_FREE, "hydra")
        ):
            continue
        label = key.removeprefix(f"{method}.").rpartition(".")[2]
        parts.append(_safe(value) if "." not in key else label + _safe(value))
    if world != workers and not elastic:
        parts.append(f"workers{world}")
    tag = "-".join(sorted(parts)) or "default"
    return tag if len(tag) <= 120 else f"{tag[:100]}-{_digest(tag)}"


def plain(config: Config, world: int) -> dict[str, Any]:
    """The configuration as plain YAML values, with nodes named as on the command line."""
    values = plain_values(config)
    values[config.task] = values.pop("task_config")
    values[config.method] = values.pop("method_config")
    values["launch"]["workers"] = world
    return values


def begun(folder: Path) -> bool:
    """Whether a run's folder holds checkpoints, from which it goes on."""
    return any((folder / "checkpoints").glob("step_*"))


def check_folder(config: Config, world: int, as_it_is: bool = False) -> None:
    """Refuse a folder that holds a run of another configuration, or checkpoints that this version
    of the suite cannot read. Writes nothing.

    A key that the folder does not know, because it is newer, may have its default. A run at a
    constant rate may go on with more steps. `train.accumulate` is not compared where it follows
    from `train.global_batch`, which is.

    Args:
        as_it_is: the run there must be the whole one, and may not go on.
    Raises:
        ConfigError: names the first key that differs.
    """
    folder = run_folder(config)
    _check_place(config.runs)
    if config.resume is Resume.never:
        return
    if not begun(folder) and not (folder / "config.yaml").exists():
        return
    if not (folder / "summary.json").exists():
        _check_format(folder)
    there = flat(without_gone(kept_config(folder)))
    here = flat(plain(config, world))
    own = {config.task: type(config.task_config), config.method: type(config.method_config)}
    nodes = NODES | own
    for key in sorted(there.keys() | here.keys()):
        then = there.get(key, _default(key, nodes))
        free = _is_free(key) or (config.launch.elastic and key[0] == "launch")
        free |= key == ("train", "accumulate") and config.train.global_batch is not None
        if not free and then != here.get(key):
            name, why = ".".join(key), ""
            fewer = isinstance(then, int) and then < config.train.steps
            if name == "train.steps" and fewer and not as_it_is:
                why = _objection_to_more_steps(config, folder, then)
                if not why:
                    continue
            if key in _GONE:
                why = f", which is {_GONE[key][1]} now"
            hint = f"{os.path.relpath(folder)} holds a run with {name}={then}{why}; {_OTHERWISE}"
            raise ConfigError(name, here.get(key), hint)


def check_data(config: Config, fingerprint: Mapping[str, object]) -> None:
    """Refuse to go on with a run, or to show a finished one, whose data are others now.

    Args:
        fingerprint: of the data; see `Task.fingerprint`.
    Raises:
        ConfigError: names what differs; or the folder's manifest.json is missing or damaged.
    """
    folder = run_folder(config)
    trained = begun(folder) or (folder / "summary.json").exists()
    if config.resume is Resume.never or not trained:
        return
    change = changed_data(kept_manifest(folder)["data"], fingerprint)
    if change is not None:
        key = "data.root" if config.data.path is None else "data.path"
        value = config.data.path or config.data.root
        raise ConfigError(key, value, f"{os.path.relpath(folder)}: {change}; {_OTHERWISE}")


def changed_data(
    then: Mapping[str, object], now: Mapping[str, object], keys: Iterable[str] | None = None
) -> str | None:
    """In words, what of the data differs from when a run began; None if nothing is.

    Args:
        then: the data's fingerprint in the run's manifest.
        now: that of today. A key that is newer than the run is left out, and so is the name, which
            is the configuration's.
        keys: to compare no others.
    """
    there: Mapping[str, object] = json.loads(json.dumps(now, default=str))
    for key in keys or (key for key in then if key != "data"):
        if key in then and key in there and then[key] != there[key]:
            return f"its data have changed since it was trained: {key} differs"
    return None


def kept_manifest(folder: Path) -> dict[str, Any]:
    """The manifest.json of a run. Raises `ConfigError` if it is missing or damaged. `Any`: JSON."""
    try:
        known: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        parts = [known, known["data"], *known.get("resumed", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        parts = [None]
    if not all(isinstance(part, dict) for part in parts):
        raise _damaged(folder / "manifest.json")
    return known


def _objection_to_more_steps(config: Config, folder: Path, then: int) -> str:
    """Why a run of `then` steps cannot go on as if it had had more from its start; empty if it
    can."""
    optim, saved = config.optim, folder / "checkpoints" / f"step_{then}"
    if optim.schedule is not Schedule.constant or optim.warmup_steps > then:
        return ", on which its rate depends: only optim.schedule=constant goes on with more"
    if (folder / "summary.json").exists() and not saved.exists():
        return ", of which the last was not saved (checkpoint.every=0)"
    return ""


def _check_place(runs: str) -> None:
    """Refuse a place where no folder of runs can be made."""
    try:
        there = nearest_existing(Path(runs))
    except OSError as error:
        raise ConfigError("runs", runs, f"cannot be used ({error.strerror})") from None
    require(there.is_dir(), "runs", runs, f"{there} is no folder; give one that can be written")
    try:
        try_to_write(there)
    except OSError as error:
        hint = f"{there} cannot be written ({error.strerror}); give a folder that can"
        raise ConfigError("runs", runs, hint) from None


def kept_config(folder: Path) -> dict[str, Any]:
    """The configuration of the run in a folder. Raises `ConfigError` if it is damaged. `Any`: it is
    as YAML holds it."""
    try:
        values = yaml.safe_load((folder / "config.yaml").read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        values = None
    if not isinstance(values, dict):
        raise _damaged(folder / "config.yaml")
    return values


def _damaged(path: Path) -> ConfigError:
    how = "damaged" if path.exists() else "missing"
    hint = f"{os.path.relpath(path)} is {how}; train afresh with resume=never"
    return ConfigError("resume", "auto", hint)


def without_gone(values: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without keys that there are no longer, where they changed nothing."""
    whole = dict(values)
    for (node, name), (harmless, _) in _GONE.items():
        known = whole.get(node)
        if isinstance(known, dict) and known.get(name) == harmless:
            whole[node] = {key: value for key, value in known.items() if key != name}
    return whole


def settings_digest(config: Config) -> str:
    """Twelve hexadecimal digits of all settings that a run's figures depend on.

    Settings at the default of their dataclass do not count, so that a new one changes no digest.
    """
    nodes = NODES | {
        config.task: type(config.task_config),
        config.method: type(config.method_config),
    }
    values = flat(plain(config, config.launch.workers))
    counted = {
        ".".join(key): value
        for key, value in values.items()
        if not _is_free(key) and value != _default(key, nodes)
    }
    return _digest(json.dumps(counted, sort_keys=True))


def _is_free(key: tuple[str, ...]) -> bool:
    return key[0] in _FREE or key[:2] in _FREE_KEYS


def _check_format(folder: Path) -> None:
    """Refuse to go on from checkpoints of another format. A damaged manifest is found, and said,
    when the checkpoint is read."""
    for path in folder.glob("checkpoints/step_*/manifest.json"):
        try:
            manifest = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(manifest, dict) and manifest.get("format") != CHECKPOINT_FORMAT:
            where = os.path.relpath(folder)
            hint = "was saved by another version of the suite; train afresh with resume=never"
            raise ConfigError("resume", "auto", f"{where} {hint}")


def _default(key: tuple[str, ...], nodes: Mapping[str, type]) -> Any:
    """The default of a key of a node; None for other keys."""
    node, name = key[0], key[-1]
    known = len(key) == 2 and hasattr(nodes.get(node), name)
    return plain_values(getattr(nodes[node], name)) if known else None


def read_summary(config: Config) -> Summary | None:
    """The figures of a finished run; None where the run has not finished, or has fewer steps than
    it is to have. Raises `ConfigError` if they are damaged."""
    folder = run_folder(config)
    try:
        found = Summary.read(folder)
        return None if found is None or found.steps < config.train.steps else found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _damaged(folder / "summary.json") from None


def plain_values(value: Any) -> Any:
    """A value as YAML holds it: dataclasses are dictionaries, enums their values. `Any`: a field of
    a schema can hold whatever its type allows."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {own.name: getattr(value, own.name) for own in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def flat(values: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """The values of nested groups, by the names that lead to them. `Any`: they are YAML's."""
    if not isinstance(values, dict):
        return {path: values}
    pairs = [flat(value, (*path, str(key))) for key, value in values.items()]
    return {key: value for pair in pairs for key, value in pair.items()}


def _safe(value: str) -> str:
    """A value as part of a folder name; a path keeps its last part and gets a digest."""
    short = f"{Path(value).name}-{_digest(value)[:6]}" if "/" in value else _short(value)
    return "".join(char if char.isalnum() or char in "._+" else "_" for char in short)


def _short(value: str) -> str:
    """A long fraction to four digits, with a digest of all its digits if that is another number;
    anything else as it is."""
    if len(value) <= _LONG or value.lstrip("-").isdigit():
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    short = f"{number:.4g}"
    return short if float(short) == number else f"{short}-{_digest(repr(number))[:6]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
