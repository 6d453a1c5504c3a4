"""What `recipes check` finds, each kind with the command that mends it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from co2.program import python
from co2.record import provenance
from co2.record.table import Table
from recipes import __main__ as commands
from recipes.recipe import Recipe
from recipes.registry import RECIPES
from recipes.runs import cells, measured
from recipes.runs.cells import composed_config
from recipes.runs.check import check, hardware, summary
from recipes.tuning import tune
from tests.recipes.test_fingerprints import LOSS, ROWS, place

__all__ = ["place"]
RECIPE = Recipe("small", "Small", "Text.", ROWS, (LOSS,), seeds=(0, 1))
GOOD = "data aa weights bb task 1 method 1 loss 1.25"
COMMAND = "python train.py task=toy scale=smoke method={} train.seed={}"
Change = Callable[[str, int], dict[str, str]]
HEAD = provenance.git().get("commit", "")[:7]
pytestmark = pytest.mark.skipif(not HEAD, reason="asks a git repository for commits")


def write(change: Change) -> None:
    """Four values of a clean commit, of which some are otherwise."""
    none = dict.fromkeys(measured.LINE, "")
    lines = []
    for row in ("allreduce", "co2"):
        for seed in (0, 1):
            key = {"recipe": "small", "row": row, "column": "toy", "scale": "smoke"}
            run = {"command": COMMAND.format(row, seed), "workers": "2", "hardware": "a cpu"}
            run |= {"fingerprint": GOOD.replace("aa", f"aa{seed}"), "commit": HEAD}
            lines.append({**none, **key, "seed": str(seed), **run, **change(row, seed)})
    measured.write(Path("out/ours.csv"), lines)


def test_good_values_pass(place: Path) -> None:
    write(lambda row, seed: {})
    assert check([RECIPE], Path("out"), "smoke", tuned=False) == []
    assert list(hardware([RECIPE], Path("out"), "smoke")) == []


@pytest.mark.parametrize(
    ("kind", "own", "why"),
    [
        ("fingerprint", {"fingerprint": ""}, "no fingerprint"),
        ("fingerprint", {"fingerprint": GOOD.replace("aa", "zz")}, "data zz, others aa1"),
        (
            "fingerprint",
            {"fingerprint": GOOD.replace("aa", "aa1").replace("task 1", "task 9")},
            "task version 9, today 1",
        ),
        ("commit", {"commit": "0123abc"}, "commit 0123abc is not in this repository"),
        ("commit", {"commit": f"{HEAD}-dirty"}, f"from a tree with changes ({HEAD}-dirty)"),
    ],
)
def test_a_value_to_make_again(place: Path, kind: str, own: dict[str, str], why: str) -> None:
    three = replace(RECIPE, rows=(*ROWS, replace(ROWS[0], name="same")))
    write(lambda row, seed: own if (row, seed) == ("co2", 1) else {})
    lines = measured.read(Path("out/ours.csv"))
    same = [{**line, "row": "same"} for line in lines if line["row"] == "allreduce"]
    measured.write(Path("out/ours.csv"), [*lines, *same])
    (found,) = check([three], Path("out"), "smoke", tuned=False)
    again = f"{python()} train.py task=toy scale=smoke method=co2 train.seed=1 resume=never"
    assert str(found) == f"{kind}: small: toy: co2, seed 1: {why}; again: {again}"
    assert summary([found, found]) == f"2 findings: 2 {kind}"


def test_several_processors_are_a_note(place: Path) -> None:
    write(lambda row, seed: {"hardware": "another"} if seed else {})
    assert check([RECIPE], Path("out"), "smoke", tuned=False) == []
    (note,) = hardware([RECIPE], Path("out"), "smoke")
    told = "values of several processors: 2 of a cpu, 2 of another"
    assert note == f"note: small: toy: {told}"


WINNER = """# @package _global_
# Written by: python -m recipes tune toy co2 --trials 2
# Fingerprint: data aa weights bb task 1 method 1 loss 1.25
optim:
  lr: 0.05
co2:
  outer_lr: 0.7
"""


def trial(number: int, rung: int, loss: float, **own: str) -> dict[str, str]:
    key = {"task": "toy", "method": "co2", "tau": "12", "average_moments": "", "scale": "smoke"}
    settings = f"optim.lr=0.0{number} co2.outer_lr=0.7"
    run = {"commit": HEAD, "fingerprint": GOOD, "settings": settings}
    figures = {"trial": str(number), "rung": str(rung), "loss": str(loss)}
    return {**dict.fromkeys(tune.FIELDS, ""), **key, **run, **figures, **own}


def write_search(*more: dict[str, str], winner: str = WINNER) -> None:
    folder = cells.APP.conf / "tuned"
    for task in folder.glob("*/"):
        shutil.rmtree(task)
    (folder / "toy").mkdir()
    (folder / "toy" / "co2.yaml").write_text(winner)
    lines = [trial(4, 15, 3.0), trial(5, 15, 2.0), trial(5, 60, 1.0), trial(4, 60, 2.0)]
    Table.of_records([*lines, *more], tune.FIELDS).write_csv(Path("out/tuning.csv"))


@pytest.fixture
def conf(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(cells.APP.conf, place / "conf")
    monkeypatch.setattr(cells, "APP", replace(cells.APP, conf=place / "conf"))
    composed_config.cache_clear()


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("Written by", "By hand, after", "winner: {}: written by hand; again: {}"),
        (
            "0.05",
            "0.04",
            "winner: {}: not the winner of its search, optim.lr=0.05 co2.outer_lr=0.7;",
        ),
        ("toy co2", "toy slowmo", "winner: {}: results/tuning.csv has no trials of it; again: {}"),
        (
            "optim:",
            "# Nothing was tried beyond the winner's co2.outer_lr.\noptim:",
            "border: {}: co2.outer_lr at the border of a space that was not widened; again: {}",
        ),
        ("data aa weights bb task 1 method 1 loss 1.25", "unknown", "fingerprint: {}: no finger"),
        ("method 1", "method 0", "fingerprint: {}: tuned on other versions than today's; again"),
    ],
)
def test_a_winner_to_tune_again(conf: None, old: str, new: str, line: str) -> None:
    write_search()
    assert check([], Path("out"), "smoke") == []
    write_search(winner=WINNER.replace(old, new))
    (found,) = check([], Path("out"), "smoke")
    python_m = f"{python()} -m recipes tune toy "
    assert str(found).startswith(line.format("conf/tuned/toy/co2.yaml", python_m))


def test_searches_to_make_again(conf: None) -> None:
    """With fewer trials than others, of a commit that is not here, or of other data."""
    slow = {"method": "slowmo"}
    small = trial(4, 15, 3.0, **slow)
    others = [trial(n, 15, 3.0, method="diloco") for n in (4, 5)]
    write_search(small, *others)
    (found,) = check([], Path("out"), "smoke")
    assert str(found).startswith("trials: tuning toy slowmo τ=12: 1 short trials, other searches 2")
    write_search(small, trial(5, 15, 3.0, **slow, commit="0123abc"), *others)
    (found,) = check([], Path("out"), "smoke")
    assert str(found).startswith("commit: tuning toy slowmo τ=12: 1 trials commit 0123abc is not")
    bad = trial(5, 15, 3.0, **slow, fingerprint=GOOD.replace("aa", "zz"))
    write_search(small, bad, *others)
    (found,) = check([], Path("out"), "smoke")
    assert str(found).startswith("fingerprint: tuning toy slowmo τ=12: data zz, others aa; again")
    assert str(found).endswith(" -m recipes tune toy slowmo --trials 2")


def test_the_command(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(RECIPES, "small", RECIPE)
    write(lambda row, seed: {})
    assert commands.main(["check", "small", "--out", "out"]) == 0
    assert capsys.readouterr().out == "0 findings\n"
    write(lambda row, seed: {"commit": "0123abc"})
    assert commands.main(["check", "small", "--out", "out"]) == 1
    assert capsys.readouterr().out.endswith("2 findings: 2 commit\n")
