"""hydra/launcher=submitit_slurm where it cannot be used. What it submits: test_jobs.py."""

from pathlib import Path

import pytest

import train
from co2.app.compose import preflight
from co2.errors import ConfigError
from tests.cli.harness import TOY, configured

LAUNCHER = "hydra/launcher=submitit_slurm"


def test_only_for_sweeps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"launcher=submitit_slurm: .*add -m"):
        configured(LAUNCHER, runs=tmp_path)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("co2.app.compose.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"launcher=submitit_slurm: .*\.\[slurm\]"):
        preflight(train.APP.conf, ["-m", *TOY, LAUNCHER], lambda *job: None)
