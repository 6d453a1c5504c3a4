"""Columns whose runs trained on and with the same: what is collected, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from co2.errors import ConfigError
from co2.program import python
from co2.record import provenance
from co2.record.folder import run_folder
from recipes import __main__ as commands
from recipes.recipe import Column, Recipe, Row
from recipes.runs import cells, fingerprints, measured
from recipes.runs.cells import TrainCell
from recipes.runs.collect import collect
from recipes.tuning import tune
from tests.grids import nonempty

LOSS = Column("toy", ("task=toy",), "final.loss", curve=False)
ROWS = tuple(Row(name, (f"method={name}",)) for name in ("allreduce", "co2"))
RECIPE = Recipe("small", "Small", "Text.", ROWS, (LOSS,), seeds=(0, 1))
GOOD = {"data": "aa", "weights": "bb", "task": 1, "method": 1, "loss": 1.25}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cell_of(row: str, seed: int) -> TrainCell:
    cell = RECIPE.cell(RECIPE.row(row), LOSS, "smoke", seed)
    assert isinstance(cell, TrainCell)
    return cell


def write(row: str, seed: int, value: float, **own: object) -> None:
    """A finished run. Its fingerprint is that of its seed, with `data=None` it has none."""
    folder = run_folder(cell_of(row, seed).config())
    folder.mkdir(parents=True, exist_ok=True)
    fingerprint = {**GOOD, "data": f"aa{seed}", **own}
    known = {
        "git": {"commit": "c" * 40, "dirty": False},
        "hardware": {"cpu": "a cpu", "cores": 2, "gpus": []},
        "packages": {"torch": "2.11.0"},
        "fingerprint": {} if own.get("data", "") is None else fingerprint,
    }
    (folder / "manifest.json").write_text(json.dumps(known))
    summary = {"final": {"loss": value}, "workers": 2, "steps": 9}
    (folder / "summary.json").write_text(json.dumps(summary))


def values() -> dict[tuple[str, str], float]:
    lines = measured.read(Path("out/ours.csv"))
    return {(line["row"], line["seed"]): float(line["value"]) for line in lines}


def write_all(change: Callable[[str, int], dict[str, object]] = lambda row, seed: {}) -> None:
    for row in RECIPE.rows:
        for seed in RECIPE.seeds:
            write(row.name, seed, 2.0, **change(row.name, seed))


def test_a_value_tells_what_it_was_trained_on(place: Path) -> None:
    write_all()
    assert collect([RECIPE], Path("out"), "smoke") == (4, 0)
    line = measured.read(Path("out/ours.csv"))[0]
    assert line["fingerprint"] == "data aa0 weights bb task 1 method 1 loss 1.25"
    assert line["torch"] == "2.11.0"
    assert fingerprints.mixed(measured.read(Path("out/ours.csv"))) == []


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({"data": "zz"}, "data zz, others aa1"),
        ({"weights": "zz"}, "weights zz, others bb"),
        ({"task": 0}, "task version 0, others 1"),
        ({"loss": 1.26}, "loss 1.26, others 1.25"),
    ],
)
def test_a_column_is_not_mixed(
    place: Path, own: dict[str, object], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It keeps what was there; a line says what to run, and with --mixed all is taken."""
    three = Row("co2_keep", ("method=co2_keep",))
    recipe = Recipe("small", "Small", "Text.", (*ROWS, three), (LOSS,), seeds=(0, 1))
    write_all()
    assert collect([RECIPE], Path("out"), "smoke") == (4, 0)
    write_all(lambda row, seed: own if (row, seed) == ("co2", 1) else {})
    made = run_folder(recipe.cell(three, LOSS, "smoke", 1).config())
    made.parent.mkdir(parents=True)
    run_folder(cell_of("allreduce", 1).config()).rename(made)
    write("allreduce", 1, 3.0)
    with pytest.raises(ConfigError) as refused:
        collect([recipe], Path("out"), "smoke")
    assert str(refused.value).startswith("collect=small: toy: would mix runs that did not")
    assert values() == dict.fromkeys(values(), 2.0) and len(values()) == 4
    words = "task=toy scale=smoke method=co2 train.seed=1 runs=results/runs/recipes"
    assert capsys.readouterr().err == (
        f"small: toy: co2, seed 1: {why}; again: {python()} train.py {words} "
        "log.wandb=disabled resume=never\n"
    )
    assert collect([recipe], Path("out"), "smoke", mixed=True) == (5, 0)
    assert values()["allreduce", "1"] == 3.0


def test_versions_of_methods_are_those_of_a_method(place: Path) -> None:
    """Another method has its own; and so have batches of another number of workers."""
    write_all(lambda row, seed: {"method": 2} if row == "co2" else {})
    assert collect([RECIPE], Path("out"), "smoke") == (4, 0)
    write_all(lambda row, seed: {"method": 2} if (row, seed) == ("co2", 0) else {})
    lines = measured.read(Path("out/ours.csv"))
    other = {**lines[0], "command": f"{lines[0]['command']} launch.workers=4", "workers": "4"}
    other["fingerprint"] = lines[0]["fingerprint"].replace("aa0", "cc")
    assert fingerprints.mixed([*lines, other]) == []
    with pytest.raises(ConfigError):
        collect([RECIPE], Path("out"), "smoke")


def test_runs_of_before_do_not_displace_known_ones(place: Path) -> None:
    write_all()
    collect([RECIPE], Path("out"), "smoke")
    write_all(lambda row, seed: {"data": None})
    assert collect([RECIPE], Path("out"), "smoke") == (0, 4)
    assert all(line["fingerprint"] for line in nonempty(measured.read(Path("out/ours.csv"))))


def test_a_column_is_made_anew_as_a_whole(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Until its last run is there, it keeps the values that tell nothing of their data."""
    write_all(lambda row, seed: {"data": None})
    collect([RECIPE], Path("out"), "smoke")
    for number, (row, seed) in enumerate((r.name, s) for r in ROWS for s in RECIPE.seeds):
        write(row, seed, 3.0)
        if number < 3:
            with pytest.raises(ConfigError):
                collect([RECIPE], Path("out"), "smoke")
            assert set(values().values()) == {2.0}
            said = capsys.readouterr().err
            assert "co2, seed" in said and "no fingerprint, and others of the column have" in said
    assert collect([RECIPE], Path("out"), "smoke") == (4, 0) and set(values().values()) == {3.0}


def test_where_nothing_is_known_all_stays(place: Path) -> None:
    write_all(lambda row, seed: {"data": None})
    assert collect([RECIPE], Path("out"), "smoke") == (4, 0)
    (stale, *others) = fingerprints.outdated(measured.read(Path("out/ours.csv")))
    assert len(others) == 1 and str(stale).startswith("small: toy: allreduce, seeds 0, 1: no fing")
    assert " -m task=toy " in str(stale) and " train.seed=0,1 " in str(stale)


@pytest.mark.parametrize("words", [["run", "table2"], ["tune", "toy", "co2"]])
def test_a_dirty_tree_is_not_recorded(
    place: Path,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(provenance, "git", lambda: {"commit": "c" * 40, "dirty": True})
    monkeypatch.setattr(commands, "run", lambda *_: 0)
    monkeypatch.setattr(cells, "run", lambda *_: {})
    monkeypatch.setattr(tune, "_conclude", lambda *_: True)
    assert commands.main(words) == 2
    assert capsys.readouterr().err == (
        "error: git=dirty: the code has changes that no commit has, so nobody could repeat what is "
        "recorded; commit them (git status), or give --dirty\n"
    )
    assert not list(place.iterdir()), "nothing is begun"
    assert commands.main([*words, "--dirty"]) == 0
    monkeypatch.setattr(provenance, "git", lambda: {"commit": "c" * 40, "dirty": False})
    assert commands.main(words) == 0
