"""Cells: missing runs are trained as by train.py; a failed one does not stop the others."""

from pathlib import Path

import pytest

from co2.errors import DIVERGED, ConfigError
from co2.record.folder import run_folder
from recipes.runs.cells import TrainCell, own_words, run
from tests.cli.harness import TOY, assert_same_run, cli
from tests.recipes.trained import trained


def cell(runs: Path, *overrides: str) -> TrainCell:
    return TrainCell((*TOY, "train.steps=12", f"runs={runs}", *overrides))


def test_cells_are_the_runs_of_train_py_and_a_failed_one_loses_no_other(tmp_path: Path):
    runs = tmp_path / "runs"
    good = cell(runs, "method=co2", "co2.tau=3", "launch.workers=2")
    diverges = cell(runs, "method=local_sgd", "optim.lr=1e30", "launch.workers=2")
    alone = cell(runs, "method=slowmo", "launch.workers=1")
    last = cell(runs, "method=allreduce", "launch.workers=2")
    failed, lines = trained([good, diverges, alone, good, last], tmp_path)
    assert failed == {diverges: DIVERGED}
    assert [c.summary() is not None for c in (good, diverges, alone, last)] == [1, 0, 1, 1]
    assert lines[0].startswith("1 runs of 1 workers") and "3 runs of 2 workers" in lines[1]
    assert any("failed with exit status 65" in line and "lr=1e30" in line for line in lines)

    failed, lines = trained([good, alone, last], tmp_path)
    assert failed == {}
    assert lines == [], "nothing is trained twice"

    for c in (good, last):
        overrides = [o for o in c.overrides if not o.startswith("runs=")]
        by_hand = cli(*overrides, runs=tmp_path / "by_hand" / c.config().method)
        assert_same_run(run_folder(c.config()), by_hand.folder)

    settings = run_folder(good.config()) / "config.yaml"
    settings.write_text(settings.read_text().replace("  steps: 12\n", "  steps: 13\n"))
    with pytest.raises(ConfigError, match=r"holds a run with train\.steps=13"):
        good.summary()


def test_a_cell_may_start_from_the_run_of_one_before_it(tmp_path: Path):
    """And is refused where that one has failed, which stops no other."""
    runs = tmp_path / "runs"
    first = cell(runs, "method=co2", "launch.workers=2")
    start = f"init_from={run_folder(first.config())}"
    second = cell(runs, "method=allreduce", "launch.workers=2", start)
    lost = cell(runs, "method=allreduce", "launch.workers=2", f"init_from={tmp_path / 'none'}")
    failed, _ = trained([first, second, lost], tmp_path)
    assert list(failed) == [lost]
    assert first.summary() is not None and second.summary() is not None


def test_a_cell_that_cannot_be_run_is_refused_before_any_is(tmp_path: Path):
    good = cell(tmp_path / "runs", "method=co2", "launch.workers=2")
    with pytest.raises(ConfigError, match="nothing"):
        run([good, cell(tmp_path / "runs", "method=nothing")])
    assert not (tmp_path / "runs").exists()


def test_a_run_takes_each_key_once_and_no_other_methods_words() -> None:
    column = (
        "task=vit",
        "slowmo.tau=48",
        "co2_keep.tau=48",
        "co2_keep.delay=12",
        "comm.dtype=bf16",
    )
    assert own_words((*column, "method=co2_keep", "co2_keep.delay=null")) == (
        *("task=vit", "co2_keep.tau=48", "co2_keep.delay=null", "comm.dtype=bf16"),
        "method=co2_keep",
    )
    assert own_words((*column, "method=allreduce")) == (
        *("task=vit", "comm.dtype=bf16", "method=allreduce"),
    )
