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

from co2.atomic import require_writable
from co2.catalogue import CATALOGUE
from co2.config import NODES, Config, Resume, Schedule, Strategy
from co2.errors import ConfigError
from co2.record.files import CHECKPOINT_FORMAT, DAMAGE, saved_steps, unreadable
from co2.record.metrics import Summary, flat

_FREE = ("log", "checkpoint", "resume", "trace", "runs", "tag", "hydra")
"""Nodes that may differ between two segments of one run, and keys."""
_FREE_KEYS = ("data.root", "data.workers", "launch.backend", "launch.gpu")
_ELASTIC = ("elastic", "min_replicas", "wait_s", "silent_s", "restarts", "store")
_UNNAMED = ("task", "method", "debug", "train.seed", *(f"launch.{key}" for key in _ELASTIC))
"""Keys that a tag does not name."""
_LONG = 8
"""Characters of a number that goes into a folder name as it was given."""
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
    elastic = "launch.elastic=true" in overrides
    parts = []
    given = dict(override.lstrip("+~").partition("=")[::2] for override in overrides)
    for key, value in given.items():
        unnamed = key in _UNNAMED or (key == "launch.workers" and value == "null")
        unnamed |= elastic and key == "launch.workers"
        if not unnamed and not _is_free(key):
            label = key.removeprefix(f"{method}.").rpartition(".")[2] if "." in key else ""
            parts.append(label + _safe(value.strip()))
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
    """Whether a run's folder holds checkpoints, from which it goes on. That of a new run is not
    listed: hundreds of processes may ask. Raises `ConfigError` where they cannot be listed."""
    return (folder / "config.yaml").exists() and len(saved_steps(folder / "checkpoints")) > 0


def check_folder(
    config: Config, world: int, as_it_is: bool = False, lists: bool = True, others: bool = True
) -> None:
    """Refuse a folder that holds a run of another configuration, or checkpoints that this version
    of the suite cannot read. Writes nothing.

    A key that the folder does not know, because it is newer, may have its default. A run at a
    constant rate may go on with more steps, and one of most methods with another number of workers.
    `train.accumulate` is not compared where it follows from `train.global_batch`, which is.

    Args:
        as_it_is: refuse more steps than the run there has, too.
        lists: look for checkpoints where config.yaml is missing, too. One process does it for all.
        others: whether the method, as it is configured, can go on with another number of workers.
    Raises:
        ConfigError: names the first key that differs.
    """
    folder = run_folder(config)
    require_writable("runs", config.runs, Path(config.runs, config.task))
    if config.resume is Resume.never:
        return
    there = (folder / "config.yaml").exists()
    if not there and not (lists and saved_steps(folder / "checkpoints")):
        return
    if not (folder / "summary.json").exists():
        _check_format(folder)
    kept, here = flat(kept_config(folder)), flat(plain(config, world))
    defaults = _defaults(config)
    # τ first: `fragments` may follow from it
    for key in sorted(kept.keys() | here.keys(), key=lambda key: (not key.endswith(".tau"), key)):
        then: Any = kept.get(key, defaults.get(key))
        now, why = here.get(key), ""
        free = _is_free(key) or (config.launch.elastic and key.startswith("launch."))
        free |= key == "launch.workers" and others and _goes_on_with_others(config)
        if key in ("mesh.replica_size", "mesh.strategy") and not as_it_is:
            free |= others and _regroups(kept, config)
        free |= key == "train.accumulate" and config.train.global_batch is not None
        if free or then == now:
            continue
        fewer = isinstance(then, int) and then < config.train.steps
        if key == "train.steps" and fewer and not as_it_is:
            why = _objection_to_more_steps(config, folder, then)
            if not why:
                continue
        if key == "mesh.replica_size" and _fragments_in_parts(kept, config):
            why = ", and workers that hold parts of weights cut these into fragments of their own"
        hint = f"{os.path.relpath(folder)} holds a run with {key}={then}{why}; {_OTHERWISE}"
        raise ConfigError(key, now, hint)


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
        now: today's fingerprint.
        keys: those to compare; by default all that both have but "data", the name, which the
            configuration chooses.
    """
    there: Mapping[str, object] = json.loads(json.dumps(now, default=str))
    for key in keys or (key for key in then if key != "data"):
        if key in then and key in there and then[key] != there[key]:
            return f"its data have changed since it was trained: {key} differs"
    return None


def kept_manifest(folder: Path) -> dict[str, Any]:
    """The manifest.json of a run. Raises `ConfigError` if it is missing or damaged. `Any`: JSON."""
    path = folder / "manifest.json"
    try:
        known: dict[str, Any] = json.loads(path.read_text())
        for part in (known, known["data"], *known.get("resumed", [])):
            part.keys()  # each is an object
    except DAMAGE:
        raise _damaged(path) from None
    return known


def kept_config(folder: Path) -> dict[str, Any]:
    """The configuration of the run in a folder. Raises `ConfigError` if it is damaged."""
    path = folder / "config.yaml"
    try:
        return settings(path)
    except DAMAGE:
        raise _damaged(path) from None


def settings(path: Path) -> dict[str, Any]:
    """What a config.yaml holds. Raises one of `DAMAGE` if it is damaged. `Any`: it is YAML."""
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError:
        values = None
    if not isinstance(values, dict):
        raise ValueError("it holds no settings")
    return values


def read_summary(config: Config) -> Summary | None:
    """The figures of a finished run; None where the run has not finished, or has fewer steps than
    it is to have. Raises `ConfigError` if they are damaged."""
    folder = run_folder(config)
    try:
        found = Summary.read(folder)
        return None if found is None or found.steps < config.train.steps else found
    except DAMAGE:
        raise _damaged(folder / "summary.json") from None


def _damaged(path: Path) -> ConfigError:
    how = "damaged" if path.exists() else "missing"
    hint = f"{os.path.relpath(path)} is {how}; train afresh with resume=never"
    return ConfigError("resume", "auto", hint)


def _goes_on_with_others(config: Config) -> bool:
    """Whether a run of this method can go on with another number of workers."""
    known = CATALOGUE.get(config.method)
    return known is not None and known.any_number


def _regroups(kept: Mapping[str, Any], config: Config) -> bool:
    """Whether a run goes on with another number of workers in a replica."""
    return (
        kept.get("mesh.replica_size", 1) != config.mesh.replica_size
        and not _fragments_in_parts(kept, config)
        and _goes_on_with_others(config)
    )


def _fragments_in_parts(kept: Mapping[str, Any], config: Config) -> bool:
    """Whether workers of a replica held parts of the weights, or would hold them now, and cut these
    into fragments: others would have others."""
    whole = (Strategy.ddp.value, Strategy.zero1.value)
    parts = {kept.get("mesh.strategy", whole[0]), config.mesh.strategy.value}
    return getattr(config.method_config, "fragments", 1) > 1 and not parts.issubset(whole)


def _objection_to_more_steps(config: Config, folder: Path, then: int) -> str:
    """Why a run of `then` steps cannot be made longer; empty if it can."""
    optim, saved = config.optim, folder / "checkpoints" / f"step_{then}"
    if optim.schedule is not Schedule.constant or optim.warmup_steps > then:
        return ", on which its rate depends: only optim.schedule=constant goes on with more"
    if (folder / "summary.json").exists() and not saved.exists():
        return ", of which the last was not saved"
    return ""


def _check_format(folder: Path) -> None:
    """Refuse to go on from checkpoints of another format. Damaged manifests are reported when the
    checkpoints are read."""
    for step in saved_steps(folder / "checkpoints"):
        path = folder / "checkpoints" / f"step_{step}" / "manifest.json"
        try:
            known = json.loads(path.read_text()).get("format")
        except DAMAGE:
            continue
        except OSError as error:
            raise unreadable(path, error) from None
        if known != CHECKPOINT_FORMAT:
            where = os.path.relpath(folder)
            hint = "was saved by another version of the suite; train afresh with resume=never"
            raise ConfigError("resume", "auto", f"{where} {hint}")


def settings_digest(config: Config) -> str:
    """Twelve hexadecimal digits of all settings that a run's figures depend on.

    Settings at the default of their dataclass do not count, so that a new one changes no digest.
    """
    defaults = _defaults(config)
    counted = {
        key: value
        for key, value in flat(plain(config, config.launch.workers)).items()
        if not _is_free(key) and value != defaults.get(key)
    }
    return _digest(json.dumps(counted, sort_keys=True))


def _is_free(key: str) -> bool:
    return key.partition(".")[0] in _FREE or key in _FREE_KEYS


def _defaults(config: Config) -> dict[str, Any]:
    """The defaults of the keys of all nodes, by their full names."""
    own = {config.task: type(config.task_config), config.method: type(config.method_config)}
    return {
        f"{node}.{key.name}": plain_values(key.default)
        for node, kind in {**NODES, **own}.items()
        for key in dataclasses.fields(kind)
        if key.default is not dataclasses.MISSING
    }


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
