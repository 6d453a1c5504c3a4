"""The example that people copy runs, alone and with two workers."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.server import environment, fork_program

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def last_loss(text: str) -> float:
    return float(text.split("last loss ")[1])


def test_it_learns_alone(tmp_path: Path):
    with (tmp_path / "log").open("w+") as file:
        process = fork_program(
            [str(EXAMPLE)], tmp_path, environment(), file.fileno(), file.fileno()
        )
        assert process.wait(300) == 0
        file.seek(0)
        text = file.read()
        assert "replicas: 1\nwarning: there is nothing to synchronize; " in text
        assert last_loss(text) < 1.0  # 8 at the start


@pytest.mark.slow  # new interpreters
def test_it_learns_with_two_workers():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = [*launcher, "--nproc-per-node", "2", str(EXAMPLE)]
    run = subprocess.run(words, capture_output=True, text=True, env=environment(), check=True)
    assert "replicas: 2\n" in run.stdout and "warning" not in run.stdout
    assert last_loss(run.stdout) < 1.0
