"""What every benchmark prints and keeps: a Markdown table with its command and hardware."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from co2.record import cpu_name


def write(
    path: Path, title: str, intro: str, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print a table, and write it to `path` with what is needed to run it again."""
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(['---'] * len(head))}|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    table = "\n".join(lines)
    print(f"\n{title}\n\n{table}\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {title}\n\n{intro}\n\n{table}\n\n{provenance()}\n")


def provenance() -> str:
    """Command, commit, hardware and versions, in a sentence each."""
    module = getattr(sys.modules["__main__"].__spec__, "name", sys.argv[0])
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    return (
        f"Command: `{shlex.join(['python', '-m', module, *sys.argv[1:]])}`. "
        f"Commit {commit}, {datetime.now(UTC):%Y-%m-%d}. "
        f"Hardware: {device}, {os.cpu_count()} cores. "
        f"Python {platform.python_version()}, torch {torch.__version__}."
    )
