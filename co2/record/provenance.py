"""Where a figure comes from: code, machine, versions, command."""

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def git() -> dict[str, Any]:
    """The commit of this source tree, and whether it has changes; empty outside a repository.

    What lies in results/ was made by the code and is none: a table that has just been written
    does not make the next run one of changed code.
    """

    def ask(*words: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(
            ["git", *words], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = ask("status", "--porcelain", "--", ":/", ":(top,exclude)results")
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return {}


def cpu_name() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def of_run(folder: Path) -> dict[str, str]:
    """ "commit" and "hardware" of a run, as its manifest tells them."""
    manifest = json.loads((folder / "manifest.json").read_text())
    machine = manifest["hardware"]
    processor = f"{machine['cpu']}, {machine['cores']} cores"
    hardware = machine["gpus"][0] if machine["gpus"] else processor
    return {"commit": _short(manifest["git"]), "hardware": hardware}


def _short(known: dict[str, Any]) -> str:
    return known.get("commit", "unknown")[:7] + ("-dirty" if known.get("dirty") else "")


def provenance() -> str:
    """Of the running `python -m …`: command, commit, hardware and versions, a sentence each."""
    module = getattr(sys.modules["__main__"].__spec__, "name", sys.argv[0])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    return (
        f"Command: `{shlex.join(['python', '-m', module, *sys.argv[1:]])}`. "
        f"Commit {_short(git())}, {datetime.now(UTC):%Y-%m-%d}. "
        f"Hardware: {device}, {os.cpu_count()} cores. "
        f"Python {platform.python_version()}, torch {torch.__version__}."
    )
