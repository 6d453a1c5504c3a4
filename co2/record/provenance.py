"""Where a figure comes from: code, machine, versions, command."""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from co2.errors import require
from co2.record.fingerprint import text

_PACKAGES = (
    *("co2-suite", "torch", "torchvision", "timm", "transformers", "tokenizers", "datasets"),
    *("numpy", "scikit-learn", "torch-geometric", "hydra-core", "wandb"),
)


@dataclass(frozen=True)
class Origin:
    """How a run was started."""

    command: str = ""
    """The command line."""
    tags: tuple[str, ...] = ()
    """Tags of its W&B run, beside task, method and scale: the recipes that ask for it."""


UNKNOWN = Origin()
"""The origin of a run that is started without a command line, by a test for example."""


def manifest(
    world: int,
    origin: Origin,
    fingerprint: dict[str, Any],
    init_from: dict[str, str] | None = None,
) -> dict[str, Any]:
    """What manifest.json holds. `Any`, because it is JSON.

    Args:
        init_from: folder and digest of the weights that the run started from.
    """
    gpus: list[str] = []
    if torch.cuda.is_initialized():  # a process that trains on the CPU shall take no GPU's memory
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "git": git(),
        "packages": {"python": platform.python_version(), **versions},
        "hardware": {"cpu": cpu_name(), "cores": os.cpu_count(), "gpus": gpus},
        "world_size": world,
        "command": origin.command,
        "data": fingerprint,
        "init_from": init_from,
    }


def of_all_starts(first: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a run that goes on: the first one, whose list "resumed" has for each later
    start what has changed of code, machine, versions, workers and command.

    Args:
        first: as the run has kept it.
        now: as if the run began now.
    """
    earlier = first.get("resumed", [])
    last = {key: value for known in (first, *earlier) for key, value in known.items()}
    kept = ("git", "packages", "hardware", "world_size", "command")
    changes = {key: now[key] for key in kept if now[key] != last.get(key)}
    return {**first, "resumed": [*earlier, changes]} if changes else first


def git() -> dict[str, Any]:
    """The commit of this source tree, and whether the tree has changes since.

    Empty where this file is not in a git repository: in an installed package, say. Changes in
    results/ and conf/tuned/ do not count: the code has made them.
    """

    def ask(*words: str) -> str:
        # If this process were killed while git refreshes its index, the index would stay locked.
        command = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        ask("ls-files", "--error-unmatch", __file__)
        generated = (":(top,exclude)results", ":(top,exclude)conf/tuned")
        changed = ask("status", "--porcelain", "--", ":/", *generated)
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return {}


def require_clean(dirty: bool) -> None:
    """Refuse to record results of code that no commit has, unless `dirty`. Raises `ConfigError`."""
    hint = "has changes that no commit has, so nobody could repeat what is recorded"
    good = dirty or not git().get("dirty")
    require(good, "git", "dirty", f"the code {hint}; commit them (git status), or give --dirty")


def cpu_name() -> str:
    """The processor's name, and in brackets the instructions that PyTorch uses there, as `AVX2`.

    These decide how sums are rounded, so a name alone does not tell which runs can be repeated.
    """
    known = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)", known.read_text() if known.exists() else "", re.M)
    name = found[1].strip() if found else platform.processor()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def of_run(folder: Path) -> dict[str, str]:
    """The keys "commit", "hardware", "torch" and "fingerprint" of a run, from its manifest. Empty
    where a run of an earlier version has not recorded it."""
    known = json.loads((folder / "manifest.json").read_text())
    machine = known["hardware"]
    names = [*machine["gpus"], f"{machine['cpu']}, {machine['cores']} cores"]
    return {
        "commit": _short(known["git"]),
        "hardware": names[0],
        "torch": known.get("packages", {}).get("torch", ""),
        "fingerprint": text(known.get("fingerprint", {})),
    }


def provenance() -> str:
    """Command, commit, hardware and versions of the running `python -m …`, a sentence each."""
    module = getattr(sys.modules["__main__"].__spec__, "name", sys.argv[0])
    command = shlex.join(["python", "-m", module.removesuffix(".__main__"), *sys.argv[1:]])
    device = torch.cuda.get_device_name() if torch.cuda.is_initialized() else cpu_name()
    return (
        f"Command: `{command}`. "
        f"Commit {_short(git())}, {datetime.now(UTC):%Y-%m-%d}. "
        f"Hardware: {device}, {os.cpu_count()} cores. "
        f"Python {platform.python_version()}, torch {torch.__version__}."
    )


def _short(known: dict[str, Any]) -> str:
    return known.get("commit", "unknown")[:7] + ("-dirty" if known.get("dirty") else "")
