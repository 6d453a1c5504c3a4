"""Tables from run folders: finished, unfinished, failed, missing, and of several commits; and the
report, which opens in a browser as wide as a phone."""

import copy
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from co2.errors import ConfigError
from co2.record.folder import run_folder
from co2.record.table import Table, read_csv
from recipes.__main__ import main, recipe_of, wanted
from recipes.recipe import SCALES, Column, Recipe, Row
from recipes.registry import RECIPES
from recipes.runs import check, fingerprints, measured
from recipes.runs.cells import Cell, TrainCell, composed_config
from recipes.runs.collect import collect
from recipes.runs.known import Known
from recipes.runs.laboratory import LabCell
from recipes.studies.glue import FineTuning
from recipes.tables import entries, figures, layout, render
from recipes.tables.entries import Entry
from recipes.tuning import tuning
from tests.recipes.conftest import write_folder

TOP1 = Column("top-1", ("task=toy",), "final.top1", factor=100, digits=1)
TOY = Recipe(
    name="golden",
    title="Golden",
    text="Percent of a toy.",
    rows=(
        Row("AllReduce", ("method=allreduce",)),
        Row("Local SGD", ("method=local_sgd", "local_sgd.tau=3")),
        Row("CO2_3", ("method=co2", "co2.tau=3")),
        Row("SlowMo", ("method=slowmo",)),
    ),
    columns=(TOP1,),
)
VALUES = {
    "AllReduce": {0: 0.90, 1: 0.92, 2: 0.91},
    "Local SGD": {0: 0.80, 1: 0.81, 2: 0.82},
    "CO2_3": {0: 0.60},
}
BEGUN, FAILED = 1, 2
"""Seeds of CO2_3. Of SlowMo nothing has run."""


def write_run(
    cell: TrainCell, value: float, commit: str, loss: float | None, finished: bool
) -> None:
    """A loss that is not finite ends it."""
    lines: list[dict[str, Any]] = [
        {"kind": "train", "step": 1, "loss": 1.0},
        {"kind": "eval", "step": 30, "top1": value / 2, "loss": 2.0, "train_s": 1.5},
        {"kind": "eval", "step": 60, "top1": value, "loss": loss, "train_s": 3.0},
    ]
    summary = {"final": {"top1": value}, "workers": 2, "steps": 60}
    folder, versions = run_folder(cell.config()), fingerprints.versions("toy", "")
    known = {"fingerprint": {**versions, "method": 1}}
    write_folder(folder, summary if finished else None, lines, commit, **known)


@pytest.fixture
def results(place: Path) -> Path:
    """Collected from runs in the working folder."""
    for row, _, seed, cell in TOY.cells("smoke"):
        if seed in VALUES.get(row.name, {}):
            commit = ("b", "a", "d")[seed] * 40
            write_run(cell, VALUES[row.name][seed], commit, loss=1 - seed / 10, finished=True)
        elif row.name == "CO2_3":
            write_run(cell, 0.5, "a" * 40, None if seed == FAILED else 1.0, finished=False)
    assert collect([TOY], place / "out", "smoke") == (7, 0)
    return place / "out"


def found(results: Path) -> dict[str, Entry]:
    same = entries.entries(TOY, measured.read(results / "ours.csv"), "smoke")
    return {entry.row.name: entry for entry in same}


def test_differences_are_over_the_seeds_that_both_have(results: Path) -> None:
    of = found(results)
    counts = {row: len(entry.values) for row, entry in of.items()}
    assert counts == {"AllReduce": 3, "Local SGD": 3, "CO2_3": 1, "SlowMo": 0}, "finished ones"
    assert of["AllReduce"].to_first is None and of["SlowMo"].to_first is None
    assert of["CO2_3"].to_first is None and of["CO2_3"].to_local is None, "one seed tells nothing"
    # Differences -10, -11, -9: t = -10 / (1 / 3^.5) = -17.32. With two degrees of freedom
    # p = 1 - |t| / (2 + t²)^.5, and 95 % lie within 4.3027 errors of 1 / 3^.5.
    difference = of["Local SGD"].to_first
    assert difference is not None and difference.mean == pytest.approx(-10)
    assert difference.p == pytest.approx(1 - 17.3205 / 302**0.5, rel=1e-3)
    assert difference.text(1) == "-10.0 [-12.5, -7.5] *", "the only test of its table"
    assert of["Local SGD"].to_local is None, "itself"


def test_pairs_are_by_seed_and_what_is_counted_has_no_interval() -> None:
    # Seeds 1 and 2 alone are in both: differences 1 and 3, t = 2 / (2^.5 / 2^.5) = 2, and with one
    # degree of freedom p = 1 - 2/π · atan(2).
    pair = entries.compared({0: 9.0, 1: 2.0, 2: 5.0}, {2: 2.0, 1: 1.0, 7: 0.0})
    assert pair is not None and pair.p == pytest.approx(0.295167, abs=1e-6)
    counted = entries.compared({0: 0.9, 1: 0.91}, {0: 0.8, 1: 0.81})
    assert counted is not None and counted.p is None and counted.text(2) == "+0.10"
    none = entries.compared({0: 1.0, 1: 2.0}, {0: 1.0 + 1e-12, 1: 2.0 + 1e-12})
    assert none is not None and none.text(1) == "+0.0", "no negative zero"


def test_a_star_is_for_all_tests_of_a_table() -> None:
    """Holm's worked example."""
    assert entries.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert entries.holm([0.5, 0.6]) == [1.0, 1.0] and entries.holm([]) == []


def best_of(column: Column, rows: tuple[Row, ...], *values: tuple[float, ...]) -> list[str]:
    same = [Entry(row, column, dict(enumerate(own))) for row, own in zip(rows, values, strict=True)]
    return [entry.row.name for entry in entries.with_best(same) if entry.best]


def test_best_is_bold_only_where_intervals_do_not_overlap(results: Path) -> None:
    higher, lower = TOP1, replace(TOP1, lower=True)
    rows = TOY.rows[:3]
    clear = ((90.0, 92.0, 91.0), (80.0, 82.0, 81.0), (60.0, 62.0, 61.0))
    assert best_of(higher, rows, *clear) == ["AllReduce"]
    assert best_of(lower, rows, *clear) == ["CO2_3"]
    # 91 ± 1 and 89.5 ± 1 overlap; 91 ± 1 and 88.9 ± 1 do not.
    assert best_of(higher, rows, clear[0], (88.5, 90.5, 89.5), clear[2]) == []
    assert best_of(higher, rows, clear[0], (87.9, 89.9, 88.9), clear[2]) == ["AllReduce"]
    assert best_of(higher, rows, clear[0], clear[1], (60.0,)) == [], "one seed: no interval"
    assert best_of(higher, rows, clear[0], clear[1], ()) == ["AllReduce"], "the last has not run"
    assert best_of(higher, rows, clear[0], (), ()) == [], "alone"
    limit = (replace(rows[0], limit=True), *rows[1:])
    assert best_of(higher, limit, *clear) == ["Local SGD"]


def test_shares_of_another_row_are_taken_seed_by_seed(results: Path) -> None:
    share = replace(TOP1, name="of Local SGD, %", of="Local SGD")
    both = replace(TOY, columns=(TOP1, share))
    rows = {row.name: row for row in both.rows}
    assert both.value(rows["AllReduce"], share, "smoke", 1) == pytest.approx(100 * 92 / 81)
    assert both.value(rows["Local SGD"], share, "smoke", 1) == 100
    assert both.value(rows["CO2_3"], share, "smoke", FAILED) is None
    no_base = replace(share, of="SlowMo")
    assert both.value(rows["AllReduce"], no_base, "smoke", 1) is None


def test_every_value_leads_back_to_its_run(results: Path) -> None:
    rows = measured.read(results / "ours.csv")
    local = [row for row in rows if row["row"] == "Local SGD"]
    assert [row["commit"] for row in local] == ["bbbbbbb", "aaaaaaa", "ddddddd-dirty"]
    for row in local:
        assert row["command"].startswith("python train.py task=toy scale=smoke method=local_sgd")
        assert f"train.seed={row['seed']}" in row["command"]
        assert row["hardware"] == "a cpu, 2 cores"
        assert (Path(row["folder"]) / "summary.json").exists()
    source = layout.origin(TOY, rows, "smoke")
    assert (
        source.startswith("7 runs")
        and "Commit aaaaaaa, bbbbbbb, ddddddd-dirty, a mixture." in source
    )
    assert layout.origin(TOY, [], "paper").startswith("Nothing has run")


def test_what_another_recipe_has_recorded_of_the_same_run_is_not_lost(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two recipes that read the same figure from the same run need it once."""
    monkeypatch.setitem(RECIPES, "golden", TOY)
    (tmp_path / "results").rename(tmp_path / "gone")
    same = replace(TOP1, name="the same")
    share = replace(TOP1, name="share", of="Local SGD")
    loss = replace(TOP1, name="loss", metric="final.loss")
    other = replace(TOY, name="other", columns=(same, share, loss))
    assert collect([other], results, "smoke") == (0, 7)
    rows = measured.read(results / "ours.csv")
    own = [{**row, "recipe": "golden", "column": "top-1"} for row in rows[7:]]
    assert own == rows[:7] and {row["column"] for row in rows[7:]} == {"the same"}
    evals = read_csv(results / "evals.csv")
    assert len([row for row in evals if row["recipe"] == "other"]) == len(evals) / 2 == 14


def test_what_ran_elsewhere_stays_while_the_recipe_asks_for_it(
    results: Path, tmp_path: Path
) -> None:
    ours, evals = measured.read(results / "ours.csv"), (results / "evals.csv").read_text()
    expected = [*ours, {**ours[0], "recipe": "other", "command": "python train.py", "digest": ""}]
    measured.write(results / "ours.csv", expected)
    assert collect([TOY], results, "smoke") == (7, 0)
    assert measured.read(results / "ours.csv") == expected

    (tmp_path / "results").rename(tmp_path / "gone")  # as after a clone
    assert collect([TOY], results, "smoke") == (0, 7)
    assert measured.read(results / "ours.csv") == expected
    assert (results / "evals.csv").read_text() == evals

    changed = replace(TOY, columns=(replace(TOP1, smoke=("train.steps=70",)),))
    assert collect([changed], results, "smoke") == (0, 0), "of another command"


def test_files_have_one_order_whatever_is_collected(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a commit shows the values that have changed, and a shuffled file gives the same bytes."""
    other = replace(TOY, name="other", columns=(replace(TOP1, name="same"), TOP1))
    collect([TOY, other], results, "smoke")
    files = [results / f"{name}.csv" for name in ("ours", "runs", "evals")]
    first = [file.read_bytes() for file in files]
    assert all(len(content.splitlines()) > 7 for content in first)
    for chosen in ([other, TOY], [TOY], [other]):
        for file, content in zip(files, first, strict=True):
            head, *lines = content.splitlines(keepends=True)
            Random(0).shuffle(lines)
            file.write_bytes(b"".join([head, *lines]))
            assert file.read_bytes() != content
        collect(chosen, results, "smoke")
        assert [file.read_bytes() for file in files] == first


def test_what_was_recorded_elsewhere_need_not_run_again(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is of a commit that is not here or had changes, or of other code than today's."""
    (tmp_path / "results").rename(tmp_path / "gone")
    recorded = Known(results / "ours.csv")
    every = wanted([TOY], "smoke", None, None)
    assert wanted([TOY], "smoke", None, recorded) == every, "no such commit"
    monkeypatch.setattr(check, "_exists", lambda commit: True)
    left = wanted([TOY], "smoke", None, recorded)
    assert len(every) - len(left) == 5 and set(left) < set(every), "two of seed 2 had changes"
    held = replace(TOY, columns=(replace(TOP1, of="AllReduce"),))
    others = {held.cell(held.rows[0], held.columns[0], "smoke", seed) for seed in held.seeds}
    assert not others <= set(left), "the first row's values stand"
    assert set(wanted([held], "smoke", None, recorded)) == {*left, *others}, "the rest need it"
    assert wanted([TOY], "smoke", [99], recorded), "a seed that nobody has"
    changed = replace(TOY, columns=(replace(TOP1, smoke=("train.steps=70",)),))
    assert len(wanted([changed], "smoke", None, recorded)) == len(every), "of another command"
    monkeypatch.setattr(fingerprints, "versions", lambda task, method: {"task": 9})
    assert wanted([TOY], "smoke", None, recorded) == every


def test_a_dry_run_tells_runs_and_times(
    results: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Evaluations of a run end with its seconds of training: 3 of every run of the fixture."""
    monkeypatch.setitem(RECIPES, "golden", TOY)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    words = ["run", "golden", "--dry-run", "--out", str(results)]
    assert main(words) == 0
    *lines, whole = capsys.readouterr().out.splitlines()
    left = [cell for *_, cell in TOY.cells("smoke") if cell.summary() is None]
    assert len(lines) == 5 and {line.split(maxsplit=1)[1] for line in lines} == {
        cell.command for cell in left
    }
    times = [line.split()[0] for line in lines if "method=co2" in line]
    assert times == ["0:00:03"] * 2, "as long as the seed that has finished"
    assert {line.split()[0] for line in lines if "method=slowmo" in line} == {"unknown"}
    assert whole.startswith("5 runs to make, 2 of which train for 0:00:06 in all")
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_what_was_measured_with_other_settings_of_conf_is_dropped(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is the same; conf, which gives the rest of the settings, is not."""
    (tmp_path / "results").rename(tmp_path / "gone")
    assert collect([TOY], results, "smoke") == (0, 7)
    other = copy.deepcopy(composed_config(()))
    other.optim.weight_decay = 0.5
    monkeypatch.setattr(TrainCell, "config", lambda cell: other)
    assert collect([TOY], results, "smoke") == (0, 0)


def test_all_is_rendered(results: Path) -> None:
    """And what no recipe makes any more is deleted."""
    tables = results / "tables"
    tables.mkdir()
    for name in ("gone.md", "gone.csv", "other_paper.md"):
        (tables / name).write_text("old")
    render.render([TOY], results, "smoke")
    assert {path.name for path in tables.glob("*.md")} == {"golden.md", "other_paper.md"}
    assert not (tables / "gone.csv").exists()
    latex = (tables / "golden.tex").read_text()
    assert r"CO2\_3" in latex and r"91.0 $\pm$ 1.0" in latex and r"\toprule" in latex
    assert "CO2_3,60.0 (n = 1)" in (tables / "golden.csv").read_text()
    page = (results / "report.html").read_text()
    assert "<svg" in page and "http://" not in page.split("<svg")[0]
    names = {path.name for path in (results / "figures").iterdir()}
    assert names == {"golden_top_1_steps.svg"}, "no seconds of a machine that did other things"
    first = (results / "figures" / "golden_top_1_steps.svg").read_bytes()
    render.render([TOY], results, "smoke")
    assert (results / "figures" / "golden_top_1_steps.svg").read_bytes() == first
    render.render([TOY], results, "paper")
    assert "Nothing has run" in (results / "report_paper.html").read_text()
    assert (results / "report.html").read_text() == page, "scales have files of their own"


@cache
def covering() -> dict[tuple[str, str], list[tuple[Row, Column, Cell]]]:
    """By recipe and scale, cells that have between them all every column, every word (of steps, of
    workers and of a method itself with every method), and every kind of row with every task, at
    scale=smoke and at a larger one. Comments, which say what `tuned=true` stands for, do not count.
    """
    seen: set[tuple[object, ...]] = set()
    found: dict[tuple[str, str], list[tuple[Row, Column, Cell]]] = {}
    for recipe, scale in product(RECIPES.values(), SCALES):
        chosen = found.setdefault((recipe.name, scale), [])
        for row, column, _, cell in recipe.cells(scale, [0]) if scale in recipe.scales else ():
            method, *others = row.overrides
            with_method = (f"{method[7:]}.", "train.", "launch.", "scale=")
            given = cell.command.partition(" # ")[0].split()
            kind = (method, *(word.partition("=")[0] for word in others), scale == "smoke")
            words: set[tuple[object, ...]] = {
                (scale, column.overrides, column.smoke, column.paper),
                *((word, method if word.startswith(with_method) else "") for word in given),
                *((word, *kind) for word in given if word.startswith("task=")),
            }
            if words - seen:
                seen |= words
                chosen.append((row, column, cell))
    return found


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("scale", SCALES)
def test_every_cell_of_every_recipe_composes(
    monkeypatch: pytest.MonkeyPatch, name: str, scale: str
) -> None:
    # Trials that were collected count here whatever conf has become: to see whether they still are
    # of the same settings takes as long again.
    monkeypatch.setattr(tuning, "is_of", lambda line, cell: line["command"] == cell.command)
    recipe = RECIPES[name]
    assert len({row.name for row in recipe.rows}) == len(recipe.rows)
    assert len({column.name for column in recipe.columns}) == len(recipe.columns)
    heads = {(figures.slug(column.part), column.head) for column in recipe.columns}
    assert len(heads) == len(recipe.columns), "two columns of a table cannot be told apart"
    if scale not in recipe.scales:
        scales = ", ".join(recipe.scales)
        with pytest.raises(ConfigError, match=f"{name} can be run at scale={scales} alone"):
            recipe_of(name, scale)
        return
    for row, column, cell in covering()[name, scale]:
        cell.check()
        if isinstance(cell, TrainCell | LabCell):
            config = cell.config()
            other = "allreduce" if isinstance(column, FineTuning) else "local_sgd"
            assert config.scale == scale and config.method in (row.overrides[0][7:], other)
            named = [word[5:] for word in column.overrides if word.startswith("task=")]
            assert config.task == (named or ["gpt2"])[0]


TABLE = Table(
    head=["task", "a_b", "share"],
    rows=[["vit", 1 / 3, 0.5], ["vit", None, 0.25], ["gpt2", 2e-17, 1]],
    title="Title",
    text="τ = 12 & `code`.",
    source="Source.",
    best=frozenset({(1, 2)}),
    formats={"share": "{:.0%}".format},
)


def test_csv_keeps_every_digit_and_type(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.csv"
    TABLE.write_csv(path)
    assert path.read_bytes() == (
        b"task,a_b,share\r\nvit,0.3333333333333333,0.5\r\nvit,,0.25\r\ngpt2,2e-17,1\r\n"
    )
    assert read_csv(path)[1] == {"task": "vit", "a_b": "", "share": "0.25"}
    assert read_csv(tmp_path / "none.csv") == []
    words = [{"a": "NA", "b": "x, y"}, {"a": "1.50", "b": 'a "b"'}]
    Table.of_records(words).write_csv(path)
    assert read_csv(path) == words, "text stays text"
