"""Recipes whose runs the workers of one job make in turn."""

from pathlib import Path

import pytest

from recipes.__main__ import main
from recipes.paper import scaling, table3
from recipes.runs import job, measured
from recipes.runs.cells import SummaryJSON, composed_config
from recipes.runs.collect import collect
from recipes.runs.job import JobCell
from recipes.tables import layout
from tests.cli.harness import ROOT, side_by_side
from tests.recipes.conftest import write_folder
from tests.recipes.job_workers import RECIPE


def started(world: int, place: Path) -> list[str]:
    """What each of the workers of a job prints that makes the recipe."""
    shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    environments = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    script = str(ROOT / "tests" / "recipes" / "job_workers.py")
    return side_by_side([script], place, environments)


def test_workers_make_what_is_of_their_number_in_turn(place: Path) -> None:
    cells = list(dict.fromkeys(cell for *_, cell in RECIPE.cells("smoke")))
    assert len(cells) == 2 * 3 * 3, "the columns of a number of workers read the same runs"
    first, second = started(2, place)
    two = [cell for cell in cells if isinstance(cell, JobCell) and cell.workers == 2]
    told = [line for line in first.splitlines() if " by 2 workers: " in line]
    assert [line.partition(": ")[2] for line in told] == [cell.command for cell in two]
    methods = [composed_config(cell.overrides).method for cell in two]
    assert methods == 2 * ["allreduce", "co2", "local_sgd"], "all of a repeat before the next"
    assert " by " not in second, "worker 0 speaks"
    assert [cell in two for cell in cells] == [cell.summary() is not None for cell in cells]
    for cell in two:
        summary = cell.summary()
        assert summary["workers"] == 2
        assert (summary["bytes_per_step"] == 0) == (job.ENDLESS[1] in cell.overrides)
        assert not list(Path(summary["folder"]).glob("**/model.pt")), "they may be large"

    assert " by 2 workers" not in started(2, place)[0], "what has finished stays"
    started(1, place)
    few = [cell for cell in cells if isinstance(cell, JobCell) and cell.workers <= 2]
    assert [cell in few for cell in cells] == [cell.summary() is not None for cell in cells]

    assert collect([RECIPE], place / "results", "smoke") == (2 * 2 * (3 + 2 + 2), 0)
    lines = measured.read(place / "results" / "ours.csv")
    pages = "\n".join(table.page() for table in layout.tables(RECIPE, lines, [], "smoke"))
    assert "Rehearsed: Toy, computation slower % (scale=smoke)" in pages
    waits = {
        (line["row"], line["column"].partition("%, ")[2]): float(line["value"])
        for line in lines
        if "waiting" in line["column"]
    }
    assert waits["AllReduce", "2 GPUs"] > 0 == waits["AllReduce", "1 GPUs"]


def run_of(folder: Path, *intervals: tuple[float, float | None]) -> SummaryJSON:
    """A finished run of tokens: rate and share of waiting of each 12 steps."""
    lines: list[dict[str, object]] = [
        {"kind": "train", "step": 12 * number, "tokens_per_s": rate, "exposed_share": share}
        for number, (rate, share) in enumerate(intervals, start=1)
    ]
    write_folder(folder, lines=[*lines, {"kind": "eval", "step": 48}])
    return {"folder": str(folder), "steps": 12 * len(intervals), "unit": "tokens"}


def test_figures_by_hand(tmp_path: Path) -> None:
    """Of two intervals of 600 tokens, one in 6 s and the other in 4 s, 3 s and 1 s of waiting."""
    own = run_of(tmp_path / "own", (1, 0.9), (1, 0.9), (100, 0.5), (150, 0.25))
    assert job.pace(own) == pytest.approx(1200 / 10)
    assert job.waiting(own) == pytest.approx(4 / 10)
    alone = run_of(tmp_path / "alone", (1, 0), (1, 0), (240, 0), (240, 0))
    assert job.slower(own, alone) == pytest.approx(100 * (6 / 5 - 1)), "6 s for what takes 5"
    unknown = run_of(tmp_path / "unknown", (1, 0.0), (1, 0.0), (100, None), (100, None))
    assert job.pace(unknown) == pytest.approx(100)
    assert job.waiting(unknown) is None and job.slower(unknown, alone) is None


def test_the_papers_model_is_timed_for_four_rounds() -> None:
    taus = {}
    for row, _, _, cell in table3.RECIPE.cells("paper", seeds=[0]):
        words = dict(word.split("=", 1) for word in cell.overrides)
        tau = next((int(words[key]) for key in words if key.endswith(".tau")), 12)
        taus[row.name] = tau
        rounds = 12 if tau == 1_000_000_000 else tau
        assert int(words["train.steps"]) == 4 * rounds and int(words["log.every"]) == rounds
        assert int(words["launch.workers"]) == cell.workers in scaling.GPUS
    assert sorted(taus.values()) == [12] * 7 + [48] * 6 + [1_000_000_000]


def test_what_was_measured_stands_beside_the_paper() -> None:
    ours = [
        {"row": row, "column": f"{table3.AT_SCALE}, {workers} GPUs", "value": str(value)}
        for row, workers, value in (
            ("AllReduce", 8, 18_000),
            ("AllReduce", 8, 20_000),
            ("CO2, steady gap, τ = 48", 16, 30_000),
            ("CO2, steady gap, τ = 48", 128, 240_000),
        )
    ]
    (table,) = scaling.tables(table3.measured(ours), [])
    here = [list(row) for row in table.rows if row[2] == scaling.HERE]
    assert here == [
        ["here", "AllReduce", "measured here", "19,000", "—", "—", "—", "—", "—"],
        ["here", "CO2, τ = 48", "measured here", "—", "30,000", "—", "—", "240,000", "1.00"],
    ]


def test_refusals(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for launcher in ("local", "slurm"):
        words = ("run", "table3", "--scale", "paper", "--dirty", "--launcher", launcher)
        assert main(words) == 2
        error = capsys.readouterr().err
        assert "slurm/worlds.sbatch table3 --scale paper" in error and error.count("\n") == 1
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(("run", "digits", "--dirty")) == 2
    assert "recipe=digits: workers of torchrun or srun make only" in capsys.readouterr().err
