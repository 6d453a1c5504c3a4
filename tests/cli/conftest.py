"""Fixtures of the end-to-end tests."""

import os

import pytest

from tests.cli.harness import LAUNCHER_VARIABLES, STORY, Run, cli, environment, spied


@pytest.fixture(autouse=True)
def nobody_started_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under srun or torchrun these tests would take themselves for workers."""
    for name in list(os.environ):
        if name in LAUNCHER_VARIABLES or name.startswith(("SLURM_", "WANDB_")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def spawned(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The undisturbed run of `STORY`: two workers that train.py has started. `spied` on."""
    place = tmp_path_factory.mktemp("spawned")
    return cli(*STORY, runs=place / "runs", env=environment(**spied(place / "spy")))
