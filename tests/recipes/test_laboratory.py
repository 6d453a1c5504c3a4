"""Recipes of the laboratory: values of its runs, and refusals."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from co2_measure.lab.training import TrialFailed
from co2_measure.lab.trial import trial_folder
from recipes.__main__ import main
from recipes.paper import table3
from recipes.recipe import Recipe
from recipes.runs import laboratory, measured
from recipes.runs.collect import collect
from recipes.runs.laboratory import LabCell
from recipes.studies import field, moe, time_to_loss
from recipes.tables import shares
from tests.recipes.conftest import write_folder


def write_run(
    of: LabCell, throughput: float, lines: Sequence[dict[str, object]] = (), **more: object
) -> Path:
    """A training's folder, as the laboratory leaves it; `more` of its summary."""
    run = trial_folder(of.trial, laboratory.EVEN, of._runs)
    folder = run / "gpt2" / of.config().method / of.trial.method / "seed0"
    summary = {"throughput": throughput, "exposed_share": 0.5, "overlap": 0.5}
    return write_folder(folder, {**summary, "workers": 2, "steps": 60, **more}, lines, "f" * 40)


SHARE = field.share("gpt2", "20")


def cell(recipe: Recipe, row: str, column: str, repeat: int) -> LabCell:
    return recipe.cell(recipe.row(row), recipe.column(column), "smoke", repeat)


def test_trials_named_beside_their_recipe_are_collected_once(place: Path) -> None:
    trials = time_to_loss.RECIPE.trials
    row, _, seed, of = next(iter(trials.cells("smoke")))
    line = {"kind": "eval", "step": 24, "loss": 3.0, "train_s": 20.0}
    write_run(of, 100.0, [line], final={"loss": 3.0}, train_s=20.0)
    assert main(["collect", "time_to_loss", trials.name]) == 0
    assert main(["collect", trials.name, "time_to_loss"]) == 0
    (found,) = measured.read(place / "results" / "ours.csv")
    assert (found["row"], found["seed"], float(found["value"])) == (row.name, str(seed), 20.0)


def test_values_are_of_runs(place: Path) -> None:
    """And what the field gives a method goes to its row alone."""
    for repeat, (of_co2, of_limit) in enumerate([(10_500.0, 12_000.0), (9_900.0, 11_000.0)]):
        write_run(cell(field.RECIPE, "co2", SHARE, repeat), of_co2)
        folder = write_run(cell(field.RECIPE, "no communication", SHARE, repeat), of_limit)
    adam = cell(field.RECIPE, "onebit_adam", SHARE, 0)
    assert adam.overrides == ("onebit_adam.freeze_step=10",)
    assert collect([field.RECIPE], place / "out", "smoke") == (4, 0)
    rows = measured.read(place / "out" / "ours.csv")
    found = [(r["row"], r["seed"], pytest.approx(float(r["value"]))) for r in rows]
    limits = [("no communication", seed, 100) for seed in "01"]
    assert found == [("co2", "0", 87.5), ("co2", "1", 90), *limits]
    assert (rows[3]["commit"], rows[3]["folder"]) == ("fffffff", str(folder.relative_to(place)))
    assert rows[1]["command"] == (
        "python -m co2.lab --workers=2 --mbit=20 --methods=co2 --repeats=2"
    )


def test_methods_take_turns_within_a_repeat() -> None:
    """All of them on one kind of link before the next, all links before the next repeat."""
    every = [made for *_, made in table3.RECIPE.cells("smoke")]
    two = list(dict.fromkeys(every))
    assert len(every) > len(two), "throughput and waiting are read from the same trainings"
    cells = two + [replace(made, trial=replace(made.trial, workers=4)) for made in two]
    turns = laboratory.in_turns(cells)
    rows = len(table3.RECIPE.rows) - len(table3.LONG)
    assert [cell.trial.repeat for cell in turns] == [n for n in range(5) for _ in range(8 * rows)]
    assert {(cell.trial.workers, cell.trial.rate) for cell in turns[:rows]} == {(2, "20")}
    methods = [made.trial.method for made in turns[:rows]]
    assert methods == [made.trial.method for made in turns[rows : 2 * rows]]
    assert set(turns) == set(cells) and len(turns) == 5 * 8 * rows
    auto = [cell for cell in turns[:rows] if "co2.tau=auto" in cell.overrides]
    assert len(auto) == 1 and auto[0].config().method_config.tau == "auto"


def test_shares_are_paired_and_tested_for_equivalence() -> None:
    # Mean 99.2, deviation 0.2, error 0.0894 of five: 95 % within 2.776 errors; the nearer bound is
    # 98, 13.4 errors away. With mean 98.1 it is 1.118 errors away, one-sided p 0.163.
    near = [99.0, 99.1, 99.2, 99.3, 99.4]
    share = shares.share_of(near)
    assert share.half_width == pytest.approx(2.776 * 0.15811 / 5**0.5, rel=1e-3)
    assert share.p == pytest.approx(0.0000352, rel=0.02)
    far = shares.share_of([value - 1.13 for value in near])
    assert far.p == pytest.approx(0.187, abs=0.01)
    assert shares.share_of([value + 3 for value in near]).p == pytest.approx(0.973, abs=0.01)
    assert shares.share_of([97.0]).text() == "97.0 %"
    assert shares.share_of([100.0, 100.0]).p == 0 and shares.share_of([97.0, 97.0]).p == 1


def test_without_root_it_is_one_line_and_nothing_is_trained(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["run", "zero_one_adam", "figure1", "--seeds", "0", "--dirty"]) == 2
    error = capsys.readouterr().err
    assert "use sudo" in error and error.count("\n") == 1
    assert not Path("results/runs").exists()
    done = [cell(field.RECIPE, "co2", SHARE, 0)]
    write_run(done[0], 9_900.0)
    laboratory.check(done)
    assert laboratory.run(done) == [], "what has been measured needs nothing"


def test_a_failed_cell_does_not_lose_the_others(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = (
        cell(table3.RECIPE, "CO2, steady gap", f"2 workers, {n} Mbit/s", 0) for n in (20, 100)
    )

    def train(self: LabCell) -> None:
        if self == bad:
            raise TrialFailed("a worker ended")
        write_run(self, 2.0)

    monkeypatch.setattr(LabCell, "train", train)
    lines: list[str] = []
    assert laboratory.run([bad, good, good], lines.append) == [bad]
    assert good.summary() is not None and "failed: a worker ended" in lines
    assert laboratory.run([bad, good], lines.append) == [bad]
    assert lines[-2].startswith("1 of 1"), "what has finished is not measured again"


def test_what_tokens_cost() -> None:
    exchange = {"comm_s": 6.0, "exposed_s": 4.5, "behind_s": 2.0, "bytes_per_step": 5e5}
    tiled = {"train_s": 12.0, "steps": 60, "exchange": exchange}
    found = [read(tiled) for read in (moe.step_ms, moe.exposed_ms, moe.hidden, moe.kilobytes)]
    assert found == [200, 75, 0.75, 500]
    short = {**tiled, "exchange": {**exchange, "comm_s": 1.0, "exposed_s": 0.0}}
    assert moe.hidden(short) == 1.0, "what was short is hidden whole"
    assert moe.hidden({**tiled, "exchange": {**exchange, "exposed_s": 7.0}}) == 0.0
    assert moe.hidden({**tiled, "exchange": {**exchange, "behind_s": 0.0}}) is None
    alone = {"train_s": 12.0, "steps": 60, "exchange": {}}
    assert moe.exposed_ms(alone) is moe.kilobytes(alone) is moe.hidden(alone) is None
