"""The example that people copy: short, and it runs, alone and with two workers."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def last_loss(command: list[str]) -> float:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    return float(run.stdout.split("last loss ")[1])


def test_it_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 40


def test_it_learns_alone():
    assert last_loss([sys.executable, str(EXAMPLE)]) < 1.0  # 8 at the start


def test_it_learns_with_two_workers():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    assert last_loss([*launcher, "--nproc-per-node", "2", str(EXAMPLE)]) < 1.0
