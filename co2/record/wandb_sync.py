"""Sends every offline W&B run under a folder to W&B: `make wandb-sync`, or

    python -m co2.record.wandb_sync [results/runs] [--all]

It calls `wandb sync`, which joins the segments of a run and remembers what it has synced. A run
that is being trained is left out, and so is one that was cut off, because its last segment is
replaced when it goes on. `--all` includes both.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from co2 import program
from co2.arguments import Parser
from co2.record.wandb import is_open

_HEAD_BYTES = 7
"""W&B's file begins with so many; a file of this length holds nothing."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns 0; 1 when something is not synced in the end."""
    parser = Parser(
        prog="python -m co2.record.wandb_sync",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="?", type=Path, default=Path("results/runs"))
    parser.add_argument("--all", action="store_true", help="include runs that have not ended")
    options = parser.parse_args(argv)
    files = sorted(options.runs.glob("**/wandb/offline-run-*/*.wandb"))
    waiting = [file for file in files if file.stat().st_size > _HEAD_BYTES and not _synced(file)]
    begun = [file for file in waiting if not options.all and is_open(file.parent.parent)]
    left = [file for file in waiting if file not in begun]
    if begun:
        count = len({file.parent.parent for file in begun})
        print(f"{count} runs are being trained or were cut off: left out; --all syncs them too")
    if not left:
        print(f"nothing to sync: no other offline W&B run under {options.runs}")
        return 0
    # Without a terminal W&B cannot ask for a key, and says how to log in.
    call = [sys.executable, "-m", "wandb", "sync", *map(str, left)]
    status = subprocess.run(call, stdin=subprocess.DEVNULL).returncode
    done = sum(map(_synced, left))
    print(f"{done} of {len(left)} segments are synced")
    return 0 if status == 0 and done == len(left) else 1


def _synced(file: Path) -> bool:
    return file.with_suffix(".wandb.synced").exists()


if __name__ == "__main__":
    program.run(main)
