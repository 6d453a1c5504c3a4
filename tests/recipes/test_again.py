"""Values made once more: which, where, and how much they may differ."""

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from co2.record.folder import run_folder
from recipes import __main__ as commands
from recipes.recipe import Column, Recipe, Row
from recipes.registry import RECIPES
from recipes.runs import again, cells, measured
from recipes.runs.cells import TrainCell
from recipes.runs.collect import collect
from tests.cli.harness import contents
from tests.recipes.test_fingerprints import place
from tests.recipes.trained import trained

__all__ = ["place"]
SHORT = ("task=toy", "train.steps=4", "train.eval_every=4", "checkpoint.every=0")
COLUMNS = (
    Column("toy", SHORT, "final.loss", curve=False),
    Column("speed", SHORT, "throughput", curve=False),
    Column("started", (*SHORT, "init_from=elsewhere"), "final.loss", curve=False),
)
ROWS = tuple(Row(name, (f"method={name}",)) for name in ("allreduce", "co2"))
AGAIN = ("again", "small", "--out", "out", "--cells")
RECIPE = Recipe("small", "Small", "Text.", ROWS, COLUMNS[:2], seeds=(0, 1, 2))


def write(wanted: Iterable[TrainCell]) -> dict[TrainCell, int]:
    """In place of trainings: their losses are those of their seeds."""
    for cell in wanted:
        config = cell.config()
        folder = run_folder(config)
        folder.mkdir(parents=True, exist_ok=True)
        known = {
            "git": {"commit": "c" * 40, "dirty": False},
            "hardware": {"cpu": "a cpu", "cores": 2, "gpus": []},
            "fingerprint": {"data": str(config.train.seed), "task": 1, "method": 1},
        }
        (folder / "manifest.json").write_text(json.dumps(known))
        summary = {"final": {"loss": 2.0 + config.train.seed}, "workers": 2, "steps": 4}
        (folder / "summary.json").write_text(json.dumps({**summary, "throughput": 9.0}))
    return {}


@pytest.fixture
def recorded(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Values of runs that were never made, as those that are made again."""
    monkeypatch.setattr(cells, "run", write)
    monkeypatch.setattr(os, "nice", lambda more: 0)
    monkeypatch.setitem(RECIPES, "small", RECIPE)
    write(cell for *_, cell in RECIPE.cells("smoke") if isinstance(cell, TrainCell))
    assert collect([RECIPE], Path("out"), "smoke") == (12, 0)
    return place


def change(lines: Iterable[str], **own: object) -> None:
    """Other records of the seeds that are named by row and seed."""
    told = measured.read(Path("out/ours.csv"))
    changed = [
        {**line, **own} if f"{line['row']} {line['seed']}" in lines else line for line in told
    ]
    measured.write(Path("out/ours.csv"), changed)


def table(out: str) -> dict[str, list[str]]:
    """What is printed, by row and seed."""
    lines = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("|")]
    return {line[0].removeprefix("small toy "): line for line in lines[2:]}


def test_a_training_comes_out_again(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder of its own, with nothing recorded; throughput is not compared."""
    recipe = replace(RECIPE, seeds=(0, 1))
    monkeypatch.setattr(cells, "run", lambda wanted: trained(wanted, place)[0])
    monkeypatch.setattr(os, "nice", lambda more: 0)
    monkeypatch.setitem(RECIPES, "small", recipe)
    trained((c for *_, c in recipe.cells("smoke") if isinstance(c, TrainCell)), place)
    assert collect([recipe], Path("out"), "smoke") == (8, 0)
    kept = contents(Path("results/runs/recipes")), contents(Path("out"))
    assert commands.main([*AGAIN, "99"]) == 0
    out = capsys.readouterr().out
    assert [row[-2:] for row in table(out).values()] == [["same", "good"]] * 4
    assert out.endswith("4 of 4 values come out again\n")
    assert kept == (contents(Path("results/runs/recipes")), contents(Path("out")))
    assert len(list(Path("results/runs/again").rglob("summary.json"))) == 4


def test_how_much_a_value_may_differ(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By 0.1 % on the same processor, on another by what the seeds differ."""
    change({"co2 0"}, value=2.0021)
    change({"co2 1"}, value=3.0021)
    change({"allreduce 0"}, value=2.5, hardware="another", fingerprint="")
    change({"allreduce 2"}, value=9.0, hardware="another", fingerprint="data 7")
    assert commands.main([*AGAIN, "99"]) == 1
    out = capsys.readouterr().out
    assert {name: row[-2:] for name, row in table(out).items()} == {
        "co2 0": ["same", "differs"],
        "co2 1": ["same", "good"],
        "co2 2": ["same", "good"],
        "allreduce 0": ["unknown", "good"],
        "allreduce 1": ["same", "good"],
        "allreduce 2": ["other", "differs"],
    }
    assert "0.0020, same processor" in out and ", another processor" in out
    assert out.endswith("4 of 6 values come out again\n")


def test_draws_repeat(recorded: Path) -> None:
    def names(seed: int) -> list[str]:
        drawn = again.draw([RECIPE], Path("out"), "smoke", 2, seed, Path("runs"))
        return [one.cell.command for one in drawn]

    assert names(0) == names(0) and len({*names(0)}) == 2
    assert len({tuple(names(seed)) for seed in range(9)}) > 1
    started = Recipe("small", "Small", "Text.", ROWS, COLUMNS[2:])
    write(cell for *_, cell in started.cells("smoke") if isinstance(cell, TrainCell))
    assert collect([started], Path("out"), "smoke") == (6, 0)
    assert not again.draw([started], Path("out"), "smoke", 2, 0, Path("runs"))


def test_a_training_that_fails_is_told(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cells, "run", lambda wanted: {})
    assert commands.main([*AGAIN, "1"]) == 1
    assert "| failed |" in capsys.readouterr().out
    assert commands.main(["again", "small", "--out", "none"]) == 2
    assert "has no value of train.py at scale=smoke to make again" in capsys.readouterr().err
    assert commands.main(["again", "small", "--cells", "0"]) == 2
