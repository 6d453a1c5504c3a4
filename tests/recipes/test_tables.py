"""Tables from run folders: finished, unfinished, missing, and of several commits."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from co2.record import run_folder
from recipes import render, table
from recipes.cells import Cell
from recipes.collect import collect, read
from recipes.recipe import Column, Recipe, Row
from recipes.registry import RECIPES

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
    columns=(Column("top-1", ("task=toy",), "final.top1", factor=100, digits=1),),
)
PAPER = [{"recipe": "golden", "row": "CO2_3", "column": "top-1", "value": "77", "spread": ".1"}]
VALUES = {
    "AllReduce": {0: 0.90, 1: 0.92, 2: 0.91},
    "Local SGD": {0: 0.80, 1: 0.81, 2: 0.82},
    "CO2_3": {0: 0.60},
}


def write_run(cell: Cell, value: float, commit: str, finished: bool = True) -> Path:
    """A run's folder, as train.py leaves it."""
    folder = run_folder(cell.config())
    folder.mkdir(parents=True)
    hardware = {"cpu": "a cpu", "cores": 2, "gpus": []}
    manifest = {"git": {"commit": commit, "dirty": False}, "hardware": hardware}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    lines: list[dict[str, Any]] = [
        {"kind": "train", "step": 1, "loss": 1.0},
        {"kind": "eval", "step": 30, "top1": value / 2, "train_s": 1.5},
        {"kind": "eval", "step": 60, "top1": value, "train_s": 3.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        summary = {"final": {"top1": value}, "workers": 2, "steps": 60, "folder": folder.name}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A results folder whose runs are: three seeds, three seeds, one seed and one begun, none."""
    monkeypatch.chdir(tmp_path)
    for row, _, seed, cell in TOY.cells("smoke"):
        if seed in VALUES.get(row.name, {}):
            write_run(cell, VALUES[row.name][seed], "a" * 40 if seed else "b" * 40)
        elif row.name == "CO2_3" and seed == 1:
            write_run(cell, 0.5, "a" * 40, finished=False)
    assert collect([TOY], tmp_path / "out", "smoke") == 7
    return tmp_path / "out"


def found(results: Path) -> dict[str, table.Entry]:
    entries = table.entries(TOY, read(results / "ours.csv"), PAPER, "smoke")
    return {entry.row.name: entry for entry in entries}


def test_mean_deviation_and_number_of_seeds(results: Path) -> None:
    entries = found(results)
    assert [entry.measured for entry in entries.values()] == [
        "91.0 ± 1.0",
        "81.0 ± 1.0",
        "60.0",
        "not run",
    ]
    assert [len(entry.values) for entry in entries.values()] == [3, 3, 1, 0]
    assert [e.paper for e in entries.values()] == ["not available"] * 2 + ["77 ± .1"] + [
        "not available"
    ]


def test_paired_test_is_over_the_seeds_that_both_have(results: Path) -> None:
    entries = found(results)
    assert entries["AllReduce"].p is None and entries["SlowMo"].p is None
    assert entries["CO2_3"].p is None, "one seed tells nothing"
    # differences -.10, -.11, -.09: t = -.1 / (.01 / 3^.5) = -17.32, two degrees of freedom
    assert entries["Local SGD"].p == pytest.approx(0.00332, rel=1e-2)


def test_best_is_bold_only_where_intervals_do_not_overlap(results: Path) -> None:
    ours = read(results / "ours.csv")
    three = [row for row in ours if row["row"] != "CO2_3"]
    assert [e.best for e in table.entries(TOY, three, PAPER, "smoke")] == [
        True,
        False,
        False,
        False,
    ]
    assert "**91.0 ± 1.0**" in table.markdown(table.entries(TOY, three, PAPER, "smoke"))
    for row in three:
        if row["row"] == "Local SGD":
            row["value"] = str(float(row["value"]) + 8.5)
    assert not any(e.best for e in table.entries(TOY, three, PAPER, "smoke")), "89.5 ± 1 overlaps"
    assert not any(e.best for e in table.entries(TOY, ours, PAPER, "smoke")), (
        "one seed, no interval"
    )


def test_every_value_leads_back_to_its_run(results: Path) -> None:
    with (results / "ours.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    local = [row for row in rows if row["row"] == "Local SGD"]
    assert [row["commit"] for row in local] == ["bbbbbbb", "aaaaaaa", "aaaaaaa"]
    for row in local:
        assert row["command"].startswith("python train.py task=toy scale=smoke method=local_sgd")
        assert f"train.seed={row['seed']}" in row["command"] and row["hardware"] == "a cpu"
    told = render.origin(TOY, rows, "smoke")
    assert "Commit aaaaaaa, bbbbbbb, a mixture." in told
    assert "not" in render.origin(TOY, rows, "paper").lower() or "Nothing" in told


def test_evaluations_are_kept_for_the_curves(results: Path) -> None:
    rows = [row for row in read(results / "evals.csv") if row["row"] == "AllReduce"]
    assert [(row["seed"], row["step"], row["value"]) for row in rows][:2] == [
        ("0", "30", "45.0"),
        ("0", "60", "90.0"),
    ]


def test_collecting_again_changes_nothing_and_leaves_other_rows(results: Path) -> None:
    before = (results / "ours.csv").read_text()
    with (results / "ours.csv").open("a") as file:
        file.write("other,AllReduce,top-1,smoke,0,1.0,c,h,2,60,f,python train.py\n")
    collect([TOY], results, "smoke")
    after = (results / "ours.csv").read_text()
    assert sorted(after.splitlines()) == sorted(
        [*before.splitlines(), "other,AllReduce,top-1,smoke,0,1.0,c,h,2,60,f,python train.py"]
    )


def test_all_is_rendered(results: Path) -> None:
    render.render([TOY], results, "smoke")
    latex = (results / "tables" / "golden.tex").read_text()
    assert r"CO2\_3" in latex and r"91.0 $\pm$ 1.0" in latex and r"\toprule" in latex
    assert "| top-1 | SlowMo | not run | 0 | — |" in (results / "tables/golden.md").read_text()
    page = (results / "report.html").read_text()
    assert page.count("<tr>") == 5 and "<svg" in page and "http://" not in page.split("<svg")[0]
    first = (results / "figures" / "golden_top_1.svg").read_bytes()
    render.render([TOY], results, "smoke")
    assert (results / "figures" / "golden_top_1.svg").read_bytes() == first


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("scale", ["smoke", "paper"])
def test_every_cell_of_every_recipe_composes(name: str, scale: str) -> None:
    recipe = RECIPES[name]
    rows = {row.name for row in recipe.rows}
    assert len(rows) == len(recipe.rows)
    for _, column, _, cell in recipe.cells(scale, seeds=[0]):
        config = cell.config()
        assert f"task={config.task}" in column.overrides and config.scale == scale


def test_what_the_paper_reports_is_a_cell_of_a_recipe() -> None:
    for row in read(Path(render.__file__).parent.parent / "results" / "paper.csv"):
        recipe = RECIPES[row["recipe"]]
        assert row["row"] in {r.name for r in recipe.rows}
        assert row["column"] in {c.name for c in recipe.columns}
        assert row["source"] and float(row["value"]) > 0
