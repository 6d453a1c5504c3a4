"""Where a figure comes from: code, machine, versions, command."""

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
    """The commit of this source tree, and whether it has changes; empty outside a repository."""

    def ask(*words: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(
            ["git", *words], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain"))}
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


def provenance() -> str:
    """Of the running `python -m …`: command, commit, hardware and versions, a sentence each."""
    module = getattr(sys.modules["__main__"].__spec__, "name", sys.argv[0])
    known = git()
    commit = known.get("commit", "unknown")[:7] + ("-dirty" if known.get("dirty") else "")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    return (
        f"Command: `{shlex.join(['python', '-m', module, *sys.argv[1:]])}`. "
        f"Commit {commit}, {datetime.now(UTC):%Y-%m-%d}. "
        f"Hardware: {device}, {os.cpu_count()} cores. "
        f"Python {platform.python_version()}, torch {torch.__version__}."
    )
