"""What is committed under results/ is what the committed values say: every table is rendered again,
and every cell that was measured is computed again by other code."""

import math
import re
import shutil
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from matplotlib.figure import Figure

from co2.errors import ConfigError
from co2.record.table import read_csv
from co2_measure.simulate.paper import PAPER as SCALING
from recipes.recipe import Column, Recipe
from recipes.registry import RECIPES
from recipes.runs import measured
from recipes.runs.collect import EVALS
from recipes.tables import pages
from recipes.tables.render import render
from recipes.tuning import tune
from tests.cli.harness import ROOT
from tests.grids import nonempty
from tests.legends import assert_told_apart

RESULTS = ROOT / "results"
PAGES = ("README.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")))
Cells = dict[tuple[str, str], str]


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "tables").glob("*.md")}


SAVE = Figure.savefig


def with_legends_alone(figure: Figure, *arguments: Any, **options: Any) -> None:
    """In place of `savefig`, which takes longer than all the rest."""
    for axis in figure.axes:
        for part in axis.get_children():
            part.set_visible(part is axis.get_legend())
    SAVE(figure, *arguments, **options)


def test_all_is_rendered_from_the_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables, what pages have between their marks, which nobody types, and figures."""
    (tmp_path / "docs").mkdir()
    for name in PAGES:
        shutil.copy(ROOT / name, tmp_path / name)
    results = tmp_path / "results"
    shutil.copytree(RESULTS, results, ignore=shutil.ignore_patterns("runs", "tables", "lab"))
    shutil.rmtree(results / "figures")
    monkeypatch.setattr(Figure, "savefig", with_legends_alone)
    monkeypatch.chdir(tmp_path)  # where no run is
    render(list(RECIPES.values()), results, "smoke")
    made = texts(results)
    assert len(made) > 30
    assert made == texts(RESULTS), "python -m recipes render"
    for name in nonempty(PAGES):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), "the same"
    assert re.findall(r"<!--=.+?-->.+?<!--/-->", (tmp_path / "README.md").read_text())
    figures = {path.name for path in (results / "figures").iterdir()}
    assert figures >= set(nonempty(path.name for path in (RESULTS / "figures").iterdir()))
    assert (results / "report.html").read_text().count("<svg") >= len(figures)
    for name in nonempty(figures):
        assert_told_apart(results / "figures" / name)


@pytest.mark.parametrize(
    "mark", ["above|table2|CO3|GPT-2, loss", "between|table1+table2|loss|CO3", "replicas|CO3"]
)
def test_a_mark_of_nothing_is_refused(tmp_path: Path, mark: str) -> None:
    (tmp_path / "README.md").write_text(f"<!--={mark}--><!--/-->")
    with pytest.raises(ConfigError, match=r"CO3.*no recipe has this kind, row or column"):
        pages.fill(tmp_path, RESULTS / "ours.csv")


@pytest.mark.parametrize(
    ("mark", "line"),
    [
        ("plans.md|vit|days", "results has no file plans.md"),
        ("plan.md|co3|days", "results/plan.md has no row with co3"),
        ("plan.md|vit|1,024|days of all", "this row of results/plan.md has no column days of all"),
        (
            "goodput.md|co2|48|elastic",
            "results/goodput.md has 15 such rows; name more cells of one",
        ),
    ],
)
def test_a_mark_of_no_cell_is_refused(tmp_path: Path, mark: str, line: str) -> None:
    (tmp_path / "README.md").write_text(f"<!--=table|{mark}--><!--/-->")
    with pytest.raises(ConfigError) as refused:
        pages.fill(tmp_path, RESULTS / "ours.csv")
    assert str(refused.value) == f"<!--=table={mark}: {line}"


def test_marked_cells_of_tables() -> None:
    """Each stands in its column of a line of the file that has the other cells, too."""
    texts = [(ROOT / name).read_text() for name in PAGES]
    marked = [
        (key.replace("\\|", "|").split("|"), shown)
        for text in texts
        for key, shown in re.findall(r"<!--=table\\?\|(.+?)-->(.*?)<!--/-->", text)
    ]
    for (file, *row, column), shown in nonempty(marked):
        found: list[str] = []
        head: list[str] = []
        for line in (RESULTS / file).read_text().splitlines():
            cells = line.split(" | ")
            cells[0] = cells[0].removeprefix("| ")
            cells[-1] = cells[-1].removesuffix(" |")
            head = cells if column in cells else head
            if all(cell in cells for cell in row) and len(cells) == len(head):
                found.append(cells[head.index(column)])
        assert found == [shown], (file, row, column)


def test_the_list_of_experiments() -> None:
    """It has each recipe once, with the number of its values, and names what has not run."""
    page = (ROOT / "docs" / "results.md").read_text()
    found = re.findall(r"^\| \[(\w+)\]\(\S+\) \| [^|]* \| ([\d,]+) \| ([^|]*)\|$", page, re.M)
    assert [name for name, *_ in found] == [name for name in RECIPES if "_trials" not in name]
    ours = [line for line in measured.read(RESULTS / "ours.csv") if line["scale"] == "smoke"]
    for name, count, missing in nonempty(found):
        rows = {row.name for row, _ in RECIPES[name].places("smoke")}
        own = [line for line in ours if line["recipe"] == name and line["row"] in rows]
        assert int(count.replace(",", "")) == len(own), name
        unseen = rows - {line["row"] for line in own}
        assert bool(missing) >= bool(unseen), name
        assert missing.strip() == "everything" or len(own) > 0


def test_the_number_of_runs_that_a_page_tells() -> None:
    page = (ROOT / "docs" / "reproduce.md").read_text()
    table4 = RECIPES["table4"]
    number = len(table4.rows) * len(table4.seeds)
    assert rf"-->{number}<!--/--> × <!--=table\|plan.md\|gpt2\|GPU-days-->" in page


def shown(page: str) -> dict[str, Cells]:
    """By title of a table: by row and head, what a cell shows."""
    found: dict[str, Cells] = {}
    for section in re.split(r"^# ", page, flags=re.MULTILINE)[1:]:
        lines = [line[2:-2].split(" | ") for line in section.splitlines() if line.startswith("| ")]
        if lines:
            head, *rows = lines
            found[section.partition("\n")[0]] = {
                (row[0], name): cell.replace("*", "").partition(" (n =")[0]
                for row in rows
                for name, cell in zip(head, row, strict=True)
            }
    return found


def expected(values: list[float], column: Column) -> str:
    if math.inf in values:
        return "not reached"
    spread = f" ± {stdev(values):,.{column.digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):,.{column.digits}f}{spread}"


@pytest.mark.parametrize(
    "recipe", [one for one in RECIPES.values() if one.listed], ids=lambda one: one.name
)
def test_a_row_has_its_own_values(recipe: Recipe) -> None:
    """In the recipe's order. The columns that a part of it shares have a table of their own."""
    values: dict[tuple[str, str], list[float]] = {}
    for line in measured.read(RESULTS / "ours.csv"):
        if (line["recipe"], line["scale"]) == (recipe.name, "smoke"):
            values.setdefault((line["row"], line["column"]), []).append(float(line["value"]))
    tables = shown((RESULTS / "tables" / f"{recipe.name}.md").read_text())
    for part in dict.fromkeys(column.part for column in recipe.columns):
        title = f"{recipe.title}: {part}" if part else recipe.title
        cells = tables.get(f"{title} (scale=smoke)", {})
        order = list(dict.fromkeys(row for row, _ in cells))
        assert order == [row.name for row in recipe.rows if row.name in order]
        for row, column in recipe.places("smoke"):
            if column.part == part:
                own, cell = values.get((row.name, column.name)), cells.get((row.name, column.head))
                if own is None:
                    assert cell in (None, "not run")
                else:
                    assert cell == expected(own, column), (row.name, column.name)


def test_what_papers_report_is_in_a_table_of_its_recipe() -> None:
    """And it agrees with what the simulator is compared with."""
    words = {"AllReduce": "AdamW", "CO2, τ = 48": "CO2 τ=48", "CO2, τ = 12": "CO2 τ=12"}
    pages = texts(RESULTS)
    for row in nonempty(read_csv(RESULTS / "paper.csv")):
        assert row["source"] and float(row["value"]) > 0
        value = f"{int(row['value']):,}" if row["value"].isdecimal() else row["value"]
        lines = pages[f"{row['recipe']}.md"].splitlines()
        assert any(line.startswith(f"| {row['row']} |") and value in line for line in lines), row
        if row["recipe"] == "table3":
            figure = row["column"].removeprefix("80 Gbit/s TCP/IP, ")
            assert SCALING[f"{words[row['row']]}, {figure}"] == float(row["value"])


@pytest.mark.parametrize("scale", ["gpu", "node", "paper"])
def test_nothing_has_run_at_other_scales(tmp_path: Path, scale: str) -> None:
    for file in RESULTS.glob("*.csv"):
        shutil.copy(file, tmp_path)
    recipes = nonempty(recipe for recipe in RECIPES.values() if scale in recipe.scales)
    render(recipes, tmp_path, scale)
    for recipe in recipes:
        page = (tmp_path / "tables" / f"{recipe.name}_{scale}.md").read_text()
        assert "Nothing has run" in page
        own = [title for title in shown(page) if "simulated" not in title]
        assert all(title.endswith("what papers report") for title in own)


def test_values_are_in_order(tmp_path: Path) -> None:
    measured.write(tmp_path / "ours.csv", measured.read(RESULTS / "ours.csv"))
    for name in ("ours.csv", "runs.csv"):
        assert (tmp_path / name).read_bytes() == (RESULTS / name).read_bytes(), name
    evals = read_csv(RESULTS / "evals.csv")
    assert measured.in_order(evals, EVALS) == evals
    trials = tune.read(RESULTS / "tuning.csv")
    assert measured.in_order(trials, (*tune.KEY, "rung", "trial")) == trials


def test_results_are_small() -> None:
    files = nonempty(path for path in RESULTS.rglob("*") if path.is_file())
    kept = [path for path in files if path.relative_to(RESULTS).parts[0] != "runs"]
    assert [path for path in nonempty(kept) if path.stat().st_size >= 2**20] == []
