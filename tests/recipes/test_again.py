"""Values that can be trusted: columns whose runs trained on and with the same, what `recipes check`
finds, and values that are made once more."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from co2.errors import ConfigError
from co2.program import python
from co2.record import provenance
from co2.record.folder import run_folder
from recipes import __main__ as commands
from recipes.recipe import Column, Recipe, Row
from recipes.registry import RECIPES
from recipes.runs import cells, fingerprints, measured
from recipes.runs.cells import TrainCell
from recipes.runs.check import check, hardware, summary
from recipes.runs.collect import collect
from tests.cli.harness import contents
from tests.recipes.conftest import write_folder
from tests.recipes.trained import trained

LOSS = Column("toy", ("task=toy",), "final.loss", curve=False)
ROWS = tuple(Row(name, (f"method={name}",)) for name in ("allreduce", "co2"))
RECIPE = Recipe("small", "Small", "Text.", ROWS, (LOSS,), seeds=(0, 1))
GOOD = {"data": "aa", "weights": "bb", "task": 1, "method": 1, "loss": 1.25}


def cell_of(row: str, seed: int) -> TrainCell:
    return RECIPE.cell(RECIPE.row(row), LOSS, "smoke", seed)


def write(row: str, seed: int, value: float, **own: object) -> None:
    """A finished run. Its fingerprint is that of its seed, with `data=None` it has none."""
    fingerprint = {} if own.get("data", "") is None else {**GOOD, "data": f"aa{seed}", **own}
    summary = {"final": {"loss": value}, "workers": 2, "steps": 9}
    packages = {"torch": "2.11.0"}
    folder = run_folder(cell_of(row, seed).config())
    write_folder(folder, summary, packages=packages, fingerprint=fingerprint)


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
    [({"data": "zz"}, "data zz, others aa1"), ({"loss": 1.26}, "loss 1.26, others 1.25")],
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


def test_a_dirty_tree_is_not_recorded(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "table2"]
    monkeypatch.setattr(provenance, "git", lambda: {"commit": "c" * 40, "dirty": True})
    monkeypatch.setattr(commands, "run", lambda *_: 0)
    assert commands.main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: git=dirty: ") and "give --dirty" in said
    assert not list(place.iterdir()), "nothing is begun"
    assert commands.main([*words, "--dirty"]) == 0
    monkeypatch.setattr(provenance, "git", lambda: {"commit": "c" * 40, "dirty": False})
    assert commands.main(words) == 0


TEXT = "data aa weights bb task 1 method 1 loss 1.25"
COMMAND = "python train.py task=toy scale=smoke method={} train.seed={} "
COMMAND += "runs=results/runs/recipes log.wandb=disabled"
Change = Callable[[str, int], dict[str, str]]
HEAD = provenance.git().get("commit", "")[:7]
in_a_repository = pytest.mark.skipif(not HEAD, reason="asks a git repository for commits")


def write_values(change: Change) -> None:
    """Four values of a clean commit, of which some are otherwise."""
    none = dict.fromkeys(measured.LINE, "")
    lines = []
    for row in ("allreduce", "co2"):
        for seed in (0, 1):
            key = {"recipe": "small", "row": row, "column": "toy", "scale": "smoke"}
            run = {"command": COMMAND.format(row, seed), "workers": "2", "hardware": "a cpu"}
            run |= {"fingerprint": TEXT.replace("aa", f"aa{seed}"), "commit": HEAD}
            run["digest"] = cell_of(row, seed).digest
            lines.append({**none, **key, "seed": str(seed), **run, **change(row, seed)})
    measured.write(Path("out/ours.csv"), lines)


@in_a_repository
def test_good_values_pass(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_values(lambda row, seed: {})
    assert check([RECIPE], Path("out"), "smoke", tuned=False) == []
    assert list(hardware([RECIPE], Path("out"), "smoke")) == []
    monkeypatch.setitem(RECIPES, "small", RECIPE)
    assert commands.main(["check", "small", "--out", "out"]) == 0
    write_values(lambda row, seed: {"hardware": "another"} if seed else {})
    assert check([RECIPE], Path("out"), "smoke", tuned=False) == []
    (note,) = hardware([RECIPE], Path("out"), "smoke")
    assert "2 of a cpu, 2 of another" in note
    write_values(lambda row, seed: {"commit": "0123abc"})
    assert commands.main(["check", "small", "--out", "out"]) == 1


@in_a_repository
@pytest.mark.parametrize(
    ("kind", "own", "why"),
    [
        ("fingerprint", {"fingerprint": TEXT.replace("aa", "zz")}, "data zz, others aa1"),
        (
            "fingerprint",
            {"fingerprint": TEXT.replace("aa", "aa1").replace("task 1", "task 9")},
            "task version 9, today 1",
        ),
        ("commit", {"commit": f"{HEAD}-dirty"}, f"from a tree with changes ({HEAD}-dirty)"),
    ],
)
def test_a_value_to_make_again(place: Path, kind: str, own: dict[str, str], why: str) -> None:
    three = replace(RECIPE, rows=(*ROWS, replace(ROWS[0], name="same")))
    write_values(lambda row, seed: own if (row, seed) == ("co2", 1) else {})
    lines = measured.read(Path("out/ours.csv"))
    same = [{**line, "row": "same"} for line in lines if line["row"] == "allreduce"]
    measured.write(Path("out/ours.csv"), [*lines, *same])
    (found,) = check([three], Path("out"), "smoke", tuned=False)
    words = COMMAND.format("co2", 1).removeprefix("python ")
    again = f"{python()} {words} resume=never"
    assert str(found) == f"{kind}: small: toy: co2, seed 1: {why}; again: {again}"
    assert summary([found, found]) == f"2 findings: 2 {kind}"


@in_a_repository
def test_a_value_of_settings_that_are_no_longer_given(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check` tells what `collect` would leave out."""
    write_values(lambda row, seed: {"digest": "of before"} if row == "co2" else {})
    (found,) = check([RECIPE], Path("out"), "smoke", tuned=False)
    text = "small: co2: 2 values of settings that recipe and conf no longer give; again: "
    assert str(found) == f"settings: {text}{python()} -m recipes run small"
    assert collect([RECIPE], Path("out"), "smoke") == (0, 2)
    said = capsys.readouterr().err
    assert said.startswith("warning: small: 2 values are left out") and "(co2)" in said
    assert check([RECIPE], Path("out"), "smoke", tuned=False) == []


def test_what_is_measured_has_a_version_alone() -> None:
    """Before versions were recorded all were 1; a training must tell what it trained on."""
    line = {"fingerprint": "", "row": "co2", "seed": "0"}
    measured_one = line | {"command": "python -m recipes run table3 --seeds 0  # method=co2"}
    trained = line | {"command": COMMAND.format("co2", 0)}
    assert fingerprints.outdated([measured_one]) == []
    (stale,) = fingerprints.outdated([measured_one], version=2)
    assert stale.why == "task version 1, today 2"
    (stale,) = fingerprints.outdated([trained])
    assert stale.why == "no fingerprint"
    newer = measured_one | {"fingerprint": "task 2"}
    (stale,) = fingerprints.mixed([measured_one, newer])
    assert stale.lines == (measured_one,) and stale.why == "task version 1, others 2"
    assert fingerprints.mixed([measured_one, newer | {"fingerprint": "task 1"}]) == []


AGAIN = ("again", "small", "--out", "out", "--cells")
SHORT = ("task=toy", "train.steps=4", "train.eval_every=4", "checkpoint.every=0")
AGAIN_COLUMNS = (
    Column("toy", SHORT, "final.loss", curve=False),
    Column("speed", SHORT, "throughput", curve=False),
)
AGAIN_RECIPE = Recipe("small", "Small", "Text.", ROWS, AGAIN_COLUMNS, seeds=(0, 1, 2))


def write_runs(wanted: Iterable[TrainCell]) -> dict[TrainCell, int]:
    """In place of trainings: their losses are those of their seeds."""
    for cell in wanted:
        config = cell.config()
        fingerprint = {"data": str(config.train.seed), "task": 1, "method": 1}
        summary = {"final": {"loss": 2.0 + config.train.seed}, "workers": 2, "steps": 4}
        written = {**summary, "throughput": 9.0}
        write_folder(run_folder(config), written, fingerprint=fingerprint)
    return {}


@pytest.fixture
def recorded(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Values of runs that were never made, as those that are made again."""
    monkeypatch.setattr(cells, "run", write_runs)
    monkeypatch.setattr(os, "nice", lambda more: 0)
    monkeypatch.setitem(RECIPES, "small", AGAIN_RECIPE)
    write_runs(cell for *_, cell in AGAIN_RECIPE.cells("smoke"))
    assert collect([AGAIN_RECIPE], Path("out"), "smoke") == (12, 0)
    return place


def change(lines: Iterable[str], **own: object) -> None:
    """Other records of the seeds that are named by row and seed."""
    told = measured.read(Path("out/ours.csv"))
    for line in told:
        line.update(own if f"{line['row']} {line['seed']}" in lines else {})
    measured.write(Path("out/ours.csv"), told)


def table(out: str) -> dict[str, list[str]]:
    """What is printed, by row and seed."""
    lines = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("|")]
    return {line[0].removeprefix("small toy "): line for line in lines[2:]}


def test_a_training_comes_out_again(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder of its own, with nothing recorded; throughput is not compared."""
    recipe = replace(AGAIN_RECIPE, seeds=(0, 1))
    monkeypatch.setattr(cells, "run", lambda wanted: trained(wanted, place)[0])
    monkeypatch.setattr(os, "nice", lambda more: 0)
    monkeypatch.setitem(RECIPES, "small", recipe)
    trained((cell for *_, cell in recipe.cells("smoke")), place)
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


def test_a_training_that_fails_is_told(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cells, "run", lambda wanted: {})
    assert commands.main([*AGAIN, "1"]) == 1
    assert "| failed |" in capsys.readouterr().out
