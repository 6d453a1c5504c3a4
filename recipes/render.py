"""From results/ours.csv, evals.csv and paper.csv to tables, figures and results/report.html."""

from collections.abc import Sequence
from pathlib import Path

from co2.record.table import Table, read_csv
from recipes import figures, report
from recipes.entries import measured
from recipes.recipe import Recipe


def render(recipes: Sequence[Recipe], out: Path, scale: str) -> None:
    """Write tables and figures of these recipes, and the page that holds them all."""
    end = ending(scale)
    sections = []
    known = [read_csv(out / name) for name in ("ours.csv", "evals.csv")]
    papers = read_csv(out / "paper.csv")
    for recipe in recipes:
        ours, evals = (
            [row for row in rows if (row["recipe"], row["scale"]) == (recipe.name, scale)]
            for rows in known
        )
        paper = [row for row in papers if row["recipe"] == recipe.name]
        tables = [measured(recipe, ours, paper, scale)]
        tables += recipe.beside(ours, paper) if recipe.beside else ()
        write_tables(tables, out / "tables" / f"{recipe.name}{end}")
        stem = out / "figures" / f"{recipe.name}{end}"
        drawn = list(figures.curves(recipe, evals, stem))
        drawn += recipe.draw(ours, stem) if recipe.draw else ()
        sections.append(report.Section(recipe.name, recipe.title, tables, drawn))
    report.write(out / f"report{end}.html", sections)


def write_tables(tables: Sequence[Table], stem: Path) -> None:
    """Write `<stem>.md` and `.tex` with all tables, and a CSV file for each by its own name."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_name(f"{stem.name}.md").write_text("\n".join(table.page() for table in tables))
    stem.with_name(f"{stem.name}.tex").write_text("\n".join(table.latex() for table in tables))
    for table in tables:
        table.write_csv(stem.with_name(f"{table.name}.csv"))


def ending(scale: str) -> str:
    """What the names of a scale's files end in."""
    return "" if scale == "smoke" else f"_{scale}"
