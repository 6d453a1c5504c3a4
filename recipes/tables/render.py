"""From results/{ours,runs,evals,paper}.csv to tables, figures and results/report.html."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from co2.record.table import Table, read_csv
from co2_measure.lab import report as laboratory
from co2_measure.lab.measurement import read_csv as read_cells
from recipes.recipe import SCALES, Recipe
from recipes.runs import measured
from recipes.tables import answer, figures, finalists, headline, layout, pages, report
from recipes.tables.latex import latex

PAPERS = Path(__file__).parents[2] / "results" / "paper.csv"
"""The papers' own values, in a clone as in an installed package."""


def render(recipes: Sequence[Recipe], out: Path, scale: str) -> None:
    """Write tables and figures of all recipes of a scale and of their tuning, and the page that
    holds them; delete those that nothing makes any more."""
    end = ending(scale)
    sections = []
    made: set[Path] = set()
    known = [measured.read(out / "ours.csv"), read_csv(out / "evals.csv")]
    papers = read_csv(out / "paper.csv") or read_csv(PAPERS)
    for recipe in recipes:
        ours, evals = (
            [row for row in rows if (row["recipe"], row["scale"]) == (recipe.name, scale)]
            for rows in known
        )
        paper = [row for row in papers if row["recipe"] == recipe.name]
        tables = layout.tables(recipe, ours, paper, scale)
        tables += _named(recipe.beside(ours, paper), end) if recipe.beside else ()
        made |= set(write_tables(tables, out / "tables" / f"{recipe.name}{end}"))
        stem = out / "figures" / f"{recipe.name}{end}"
        drawn = list(figures.curves(recipe, evals, stem))
        drawn += recipe.draw(ours, stem) if recipe.draw else ()
        made |= set(drawn)
        sections.append(report.Section(recipe.name, recipe.title, tables, drawn))
    trials = read_csv(out / "tuning.csv")
    searches = _named(finalists.tables(trials, scale), end)
    if searches:
        made |= set(write_tables(searches, out / "tables" / f"tuning{end}"))
        sections.append(report.Section("tuning", "Tuning", searches, []))
    first: list[Path] = []
    said = None
    if scale == "smoke":
        pages.fill(out.parent, out / "ours.csv")
        said = pages.in_short(out.parent)
        ours = [row for row in known[0] if row["scale"] == scale]
        first = list(headline.draw(ours, out / "figures" / "headline.svg"))
        made |= set(first)
        lab = out / "lab"
        if (lab / "cells.csv").exists():
            laboratory.draw(read_cells(lab / "cells.csv"), lab / "throughput.svg")
    opening = replace(answer.opening(known[0], trials, scale, said), figures=first)
    report.write(out / f"report{end}.html", opening, sections)
    for folder in (out / "tables", out / "figures"):
        for path in folder.glob("*"):
            if path not in made and _scale_of(path) == scale:
                path.unlink()


def write_tables(tables: Sequence[Table], stem: Path) -> Iterator[Path]:
    """Write `<stem>.md` and `.tex` with all tables, and a CSV file for each by its own name; yield
    the files.

    Of a table without rows only its words are written, to `<stem>.md`.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    full = [table for table in tables if table.rows]
    pages, tex = (stem.with_name(f"{stem.name}.{kind}") for kind in ("md", "tex"))
    pages.write_text("\n".join(table.page() for table in tables))
    tex.write_text("\n".join(latex(table) for table in full))
    yield from (pages, tex)
    for table in full:
        path = stem.with_name(f"{table.name}.csv")
        table.write_csv(path)
        yield path


def _named(tables: Iterable[Table], end: str) -> list[Table]:
    """The tables with the names of their scale's files."""
    return [replace(table, name=f"{table.name}{end}") for table in tables]


def _scale_of(path: Path) -> str:
    """The scale whose file this is, by its name."""
    others = (scale for scale in SCALES if ending(scale) and path.stem.endswith(ending(scale)))
    return next(others, "smoke")


def ending(scale: str) -> str:
    """What the names of a scale's files end in."""
    return "" if scale == "smoke" else f"_{scale}"
