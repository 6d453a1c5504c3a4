"""results/tables (Markdown, LaTeX, CSV), results/figures, results/report.html: from CSV files."""

from collections.abc import Sequence
from pathlib import Path

from recipes import figures, report, table
from recipes.collect import read
from recipes.entries import measured
from recipes.recipe import Recipe


def render(recipes: Sequence[Recipe], out: Path, scale: str) -> None:
    """Tables and figures of these recipes, and the page that has them all."""
    end = ending(scale)
    sections = []
    known = [read(out / name) for name in ("ours.csv", "evals.csv")]
    papers = read(out / "paper.csv")
    for recipe in recipes:
        ours, evals = (
            [row for row in rows if (row["recipe"], row["scale"]) == (recipe.name, scale)]
            for rows in known
        )
        paper = [row for row in papers if row["recipe"] == recipe.name]
        tables = [measured(recipe, ours, paper, scale)]
        tables += recipe.beside(paper) if recipe.beside else ()
        table.write(tables, out / "tables" / f"{recipe.name}{end}")
        stem = out / "figures" / f"{recipe.name}{end}"
        drawn = list(figures.curves(recipe, evals, stem))
        drawn += recipe.draw(ours, stem) if recipe.draw else ()
        sections.append(report.Section(recipe.name, recipe.title, tables, drawn))
    report.write(out / f"report{end}.html", sections)


def ending(scale: str) -> str:
    """Of the names of a scale's files."""
    return "" if scale == "smoke" else f"_{scale}"
