"""Sweeps that Hydra submits: hydra/launcher=submitit_slurm."""

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

import train
from co2.compose import preflight
from co2.errors import ConfigError
from tests.cli.harness import (
    ROOT,
    STORY,
    TOY,
    Run,
    command,
    configured,
    folder_of,
    folders,
    until,
)
from tests.slurm.controller import LIMIT_S, Job, Slurm
from tests.slurm.test_jobs import assert_goes_on, trains

LAUNCHER = "hydra/launcher=submitit_slurm"


@pytest.mark.skipif(find_spec("submitit") is None, reason="needs the extra: .[slurm]")
def test_sweep(slurm: Slurm, tmp_path: Path, spawned: Run) -> None:
    """Two jobs of two tasks. One is told to stop and goes on; the command waits for it."""
    runs, limit = tmp_path / "runs", "hydra.launcher.timeout_min=9"
    base = ["toy.delay_s=0.2", "checkpoint.every=0", *(w for w in STORY if "tau" not in w)]
    one, three = (folder_of(*base, f"co2.tau={tau}", runs=runs) for tau in (1, 3))
    words = command("-m", LAUNCHER, limit, *base, "co2.tau=1,3", runs=runs)
    with subprocess.Popen(words, cwd=ROOT, env=slurm.env) as launching:
        try:
            until(trains(three), launching)
            (place,) = runs.glob(".multirun/submitit/*_1")
            job = Job(slurm, place.name, place / f"{place.name}_0_log.out")
            slurm.call("scancel", "--signal=USR1", job.number)
            assert_goes_on(job, three, spawned)
            assert launching.wait(LIMIT_S) == 0
        finally:
            launching.kill()
    assert set(folders(runs)) == {one, three}
    assert (one / "summary.json").exists()


def test_only_for_sweeps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"launcher=submitit_slurm: .*add -m"):
        configured(LAUNCHER, runs=tmp_path)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("co2.compose.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"launcher=submitit_slurm: .*\.\[slurm\]"):
        preflight(train.CONF, "config", ["-m", *TOY, LAUNCHER], lambda *job: None)
