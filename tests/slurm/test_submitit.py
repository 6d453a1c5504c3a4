"""Sweeps that Hydra submits: hydra/launcher=submitit_slurm."""

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

import train
from co2.compose import preflight
from co2.errors import ConfigError
from tests.cli.harness import ROOT, STORY, TOY, Run, command, configured, folder_of
from tests.slurm.controller import LIMIT_S, Job, Slurm
from tests.slurm.test_jobs import SLOW, assert_goes_on, trains

LAUNCHER = "hydra/launcher=submitit_slurm"


@pytest.mark.skipif(find_spec("submitit") is None, reason="needs the extra: .[slurm]")
def test_sweep(slurm: Slurm, tmp_path: Path, spawned: Run) -> None:
    """Two jobs; one is told to stop, goes on, and its command waits for it."""
    runs = tmp_path / "runs"
    places = [folder_of(*STORY, *SLOW, f"co2.tau={tau}", runs=runs) for tau in (1, 3)]
    words = command(
        "-m", LAUNCHER, "hydra.launcher.timeout_min=9", *STORY, *SLOW, "co2.tau=1,3", runs=runs
    )
    with subprocess.Popen(
        words, cwd=ROOT, env=slurm.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launching:
        try:
            jobs = submitted(slurm, runs, launching)
            jobs[1].until(trains(places[1]))
            slurm.call("scancel", "--signal=USR1", jobs[1].number)
            assert_goes_on(jobs[1], places[1], spawned)
            assert launching.wait(LIMIT_S) == 0
        finally:
            launching.kill()
    assert (places[0] / "summary.json").exists()


def submitted(slurm: Slurm, runs: Path, launching: subprocess.Popen) -> list[Job]:
    """The array of two jobs that the command submits, and where they write."""
    place = runs / ".multirun/submitit"
    newest = Job(slurm, "", Path(os.devnull))
    newest.until(lambda: launching.poll() is not None or any(place.glob("*_0")))
    assert launching.poll() is None, launching.stdout and launching.stdout.read()
    (first,) = place.glob("*_0")
    numbers = [first.name, first.name.removesuffix("0") + "1"]
    return [Job(slurm, name, place / name / f"{name}_0_log.out") for name in numbers]


def test_only_for_sweeps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"launcher=submitit_slurm: .*add -m"):
        configured(LAUNCHER, runs=tmp_path)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("co2.compose.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"launcher=submitit_slurm: .*\.\[slurm\]"):
        preflight(train.CONF, "config", ["-m", *TOY, LAUNCHER], lambda *job: None)
