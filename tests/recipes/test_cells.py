"""Cells: what is missing is trained, as train.py would; a failed one does not lose the others."""

from pathlib import Path

import pytest

from co2.errors import ConfigError
from co2.record.folder import run_folder
from recipes.cells import Cell, run
from tests.cli.harness import TOY, assert_same_run, cli


def cell(runs: Path, *overrides: str) -> Cell:
    return Cell((*TOY, "train.steps=12", f"runs={runs}", *overrides))


def test_cells_are_the_runs_of_train_py_and_a_failed_one_loses_no_other(tmp_path: Path):
    runs = tmp_path / "runs"
    good = cell(runs, "method=co2", "co2.tau=3", "launch.workers=2")
    diverges = cell(runs, "method=local_sgd", "optim.lr=1e30", "launch.workers=2")
    alone = cell(runs, "method=slowmo", "launch.workers=1")
    last = cell(runs, "method=allreduce", "launch.workers=2")
    said: list[str] = []
    assert run([good, diverges, alone, good, last], said.append) == [diverges]
    assert [c.summary() is not None for c in (good, diverges, alone, last)] == [1, 0, 1, 1]
    assert said[0].startswith("1 runs of 1 workers") and "3 runs of 2 workers" in said[1]
    assert any("failed with exit status 65" in line and "lr=1e30" in line for line in said)

    said.clear()
    assert run([good, alone, last], said.append) == []
    assert said == [], "nothing is trained twice"

    for c in (good, last):
        overrides = [o for o in c.overrides if not o.startswith("runs=")]
        by_hand = cli(*overrides, runs=tmp_path / "by_hand" / c.config().method)
        assert_same_run(run_folder(c.config()), by_hand.folder)


def test_a_cell_that_cannot_be_run_is_refused_before_any_is(tmp_path: Path):
    good = cell(tmp_path / "runs", "method=co2", "launch.workers=2")
    with pytest.raises(ConfigError, match="nothing"):
        run([good, cell(tmp_path / "runs", "method=nothing")])
    assert not (tmp_path / "runs").exists()
