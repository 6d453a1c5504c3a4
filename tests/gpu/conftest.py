"""Fixtures of the tests on a GPU, and where their bodies also run without one."""

import os
from pathlib import Path

import pytest
import torch

from tests.server import LAUNCHER_VARIABLES
from tests.tasks.conftest import story

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ],
)


@pytest.fixture(autouse=True)
def nobody_started_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under srun or torchrun these tests would take themselves for workers."""
    for name in list(os.environ):
        if name in LAUNCHER_VARIABLES or name.startswith(("SLURM_", "WANDB_")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text; to tokenize the embedded corpus takes ten seconds of processor time."""
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text(story(40_000))
    return path
