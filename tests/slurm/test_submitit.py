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
    assert_same_run,
    command,
    configured,
    folder_of,
    folders,
)
from tests.slurm.controller import LIMIT_S, Slurm

LAUNCHER = "hydra/launcher=submitit_slurm"


@pytest.mark.skipif(find_spec("submitit") is None, reason="needs the extra: .[slurm]")
def test_sweep(slurm: Slurm, tmp_path: Path, spawned: Run) -> None:
    """The command waits for its jobs, each of two tasks."""
    runs, limit = tmp_path / "runs", "hydra.launcher.timeout_min=9"
    words = command("-m", LAUNCHER, limit, *STORY, "co2.tau=1,3", runs=runs)
    ended = subprocess.run(words, cwd=ROOT, env=slurm.env, timeout=LIMIT_S)
    assert ended.returncode == 0
    one, three = (folder_of(*STORY, f"co2.tau={tau}", runs=runs) for tau in (1, 3))
    assert set(folders(runs)) == {one, three}
    assert_same_run(three, spawned.folder)
    said = (path.read_text() for path in runs.glob(".multirun/submitit/*/*_0_log.out"))
    assert sum(text.count("┌") for text in said) == 2


def test_only_for_sweeps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"launcher=submitit_slurm: .*add -m"):
        configured(LAUNCHER, runs=tmp_path)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("co2.compose.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"launcher=submitit_slurm: .*\.\[slurm\]"):
        preflight(train.CONF, "config", ["-m", *TOY, LAUNCHER], lambda *job: None)
