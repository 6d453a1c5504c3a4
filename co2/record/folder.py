"""A run's folder: config, manifest, metrics, summary. W&B is told the same."""

import dataclasses
import hashlib
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

from co2.config import NODES, Config, Resume, Wandb
from co2.errors import ConfigError
from co2.files import write_durably
from co2.record.provenance import cpu_name, git
from co2.record.wandb import Tracking

# What may differ between two segments of one run.
_FREE = ("log", "checkpoint", "resume", "trace", "runs", "tag")
_FREE_KEYS = (("data", "root"), ("data", "workers"), ("launch", "backend"))

_PACKAGES = (
    *("torch", "torchvision", "timm", "transformers", "tokenizers", "datasets", "numpy"),
    *("scikit-learn", "hydra-core", "wandb"),
)


def run_folder(config: Config) -> Path:
    """`<runs>/<task>/<method>/<tag>/seed<k>`: the same on every worker, and at every attempt."""
    path = Path(config.runs, config.task, config.method, config.tag, f"seed{config.train.seed}")
    return path.absolute()


def tag_from(overrides: Sequence[str], world: int, workers: int, method: str) -> str:
    """The overrides that matter, as a folder name: `co2.tau=3` → `tau3`; none → `default`.

    Args:
        overrides: `key=value` as given on the command line.
        world, workers: processes there are, and `launch.workers`; under torchrun they may differ.
        method: keys of its node go without it.
    """
    parts = []
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        node = key.partition(".")[0]
        elsewhere = ("task", "method", "train.seed", "data.root", "data.workers", "launch.backend")
        if key in elsewhere or node in (*_FREE, "hydra"):
            continue
        label = key.removeprefix(f"{method}.").rpartition(".")[2]
        parts.append(_safe(value) if "." not in key else label + _safe(value))
    if world != workers:
        parts.append(f"workers{world}")
    tag = "-".join(sorted(parts)) or "default"
    return tag if len(tag) <= 120 else f"{tag[:100]}-{_digest(tag)}"


def plain(config: Config, world: int) -> dict[str, Any]:
    """The configuration as plain YAML values, with nodes named as on the command line."""
    values = {
        field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)
    }
    values[config.task] = values.pop("task_config")
    values[config.method] = values.pop("method_config")
    values["launch"]["workers"] = world
    return values


def check_folder(config: Config, world: int) -> None:
    """Refuse a folder that holds a run of another configuration. Writes nothing.

    A key that is newer than the folder is no difference while it has its default.

    Raises:
        ConfigError: with the first key that differs.
    """
    folder = run_folder(config)
    if config.resume is Resume.never or not (folder / "config.yaml").exists():
        return
    there = _flat(yaml.safe_load((folder / "config.yaml").read_text()))
    here = _flat(plain(config, world))
    for key in sorted(there.keys() | here.keys()):
        free = key[0] in _FREE or key[:2] in _FREE_KEYS
        then = there.get(key, _default(key))
        if not free and then != here.get(key):
            name = ".".join(key)
            raise ConfigError(
                name,
                here.get(key),
                f"{os.path.relpath(folder)} holds a run with {name}={then}; "
                "give this one a tag=NAME of its own, or start that one afresh with resume=never",
            )


def _default(key: tuple[str, ...]) -> Any:
    """Of a field of the schemas that every run has; None for others."""
    node, name = key[0], key[-1]
    known = len(key) == 2 and hasattr(NODES.get(node), name)
    return _plain(getattr(NODES[node], name)) if known else None


def read_summary(config: Config) -> dict[str, Any] | None:
    """The figures of a finished run; None where there is something to train."""
    path = run_folder(config) / "summary.json"
    return json.loads(path.read_text()) if path.exists() else None


class Record:
    """Writes one run's folder. Worker 0 only.

    Args:
        config: of the run.
        world: number of workers.
        fingerprint: of the data.
        say: prints a line for the person at the console.
    """

    def __init__(
        self,
        config: Config,
        world: int,
        fingerprint: dict[str, Any],
        say: Callable[[str], None] = print,
    ) -> None:
        self.folder = run_folder(config)
        self._config, self._values, self._say = config, plain(config, world), say
        self.folder.mkdir(parents=True, exist_ok=True)
        write_durably(self.folder / "config.yaml", yaml.safe_dump(self._values, sort_keys=False))
        manifest = {**_manifest(world), "data": fingerprint}
        write_durably(self.folder / "manifest.json", json.dumps(manifest, indent=1, default=str))
        self._metrics = self.folder / "metrics.jsonl"
        self._summary: dict[str, Any] | None = None
        self._tracking: Tracking | None = None

    def begin(self, step: int) -> None:
        """The run goes on from `step`: metrics after it are dropped."""
        if self._metrics.exists():
            kept = []
            for line in self._metrics.read_text().splitlines(keepends=True):
                try:
                    if line.endswith("\n") and json.loads(line)["step"] <= step:
                        kept.append(line)
                except ValueError:  # torn by a crash
                    continue
            write_durably(self._metrics, "".join(kept))
        if self._config.log.wandb is not Wandb.disabled:
            self._tracking = Tracking(self._config, self._values, self.folder, step, self._say)

    def log(self, kind: str, step: int, figures: dict[str, Any]) -> None:
        """One line of metrics.jsonl. Not-a-number becomes null."""
        clean = {key: _finite(value) for key, value in figures.items()}
        line = {"kind": kind, "step": step, **clean}
        with self._metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._tracking is not None:
            self._tracking.log(line)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json, whose presence means: finished."""
        self._summary = {key: _finite(value) for key, value in summary.items()}
        write_durably(self.folder / "summary.json", json.dumps(self._summary, indent=1))

    def close(self, status: int) -> None:
        """Nothing is written any more. `status` 0: finished, or to be continued."""
        if self._tracking is not None:
            if self._summary is not None:
                self._tracking.finish(self._summary)
            self._tracking.close(status)


def _manifest(world: int) -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "git": git(),
        "packages": {"python": platform.python_version(), **_versions()},
        "hardware": {"cpu": cpu_name(), "cores": os.cpu_count(), "gpus": gpus},
        "world_size": world,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _flat(values: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not isinstance(values, dict):
        return {path: values}
    pairs = [_flat(value, (*path, str(key))) for key, value in values.items()]
    return {key: value for pair in pairs for key, value in pair.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _safe(value: str) -> str:
    """A value as part of a folder name; a path keeps its last part and gets a digest."""
    short = value if "/" not in value else f"{Path(value).name}-{_digest(value)[:6]}"
    return "".join(char if char.isalnum() or char in "._+" else "_" for char in short)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
