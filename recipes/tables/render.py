"""From results/{ours,runs,evals,paper}.csv to tables, figures and results/report.html."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from co2.record.table import Table, read_csv
from recipes.recipe import SCALES, Recipe
from recipes.runs import measured
from recipes.tables import answer, figures, finalists, layout, pages, report

PAPERS = Path(__file__).parents[2] / "results" / "paper.csv"
"""The papers' own values, in a clone as in an installed package."""


def render(recipes: Sequence[Recipe], out: Path, scale: str) -> None:
    """Write tables and figures of all recipes of a scale and of their tuning, and the page that
    holds them; delete those that nothing makes any more."""
    end = ending(scale)
    sections, headlines = [], []
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
        headlines += [recipe.headline(stem)] if recipe.headline else []
        sections.append(report.Section(recipe.name, recipe.title, tables, drawn))
    trials = read_csv(out / "tuning.csv")
    searches = _named(finalists.tables(trials, scale), end)
    if searches:
        made |= set(write_tables(searches, out / "tables" / f"tuning{end}"))
        sections.append(report.Section("tuning", "Tuning", searches, []))
    said = pages.in_short(out.parent) if scale == "smoke" else None
    opening = answer.opening(known[0], trials, scale, said)
    report.write(out / f"report{end}.html", *_with_headlines(opening, sections, headlines))
    for folder in (out / "tables", out / "figures"):
        for path in folder.glob("*"):
            if path not in made and _scale_of(path) == scale:
                path.unlink()


def _with_headlines(
    opening: report.Opening, sections: Sequence[report.Section], headlines: Collection[Path]
) -> tuple[report.Opening, list[report.Section]]:
    """Opening and sections. Figures that are headlines move to the opening."""
    others = [
        replace(section, figures=[path for path in section.figures if path not in headlines])
        for section in sections
    ]
    drawn = [path for section in sections for path in section.figures if path in headlines]
    return replace(opening, figures=drawn), others


def write_tables(tables: Sequence[Table], stem: Path) -> Iterator[Path]:
    """Write `<stem>.md` and `.tex` with all tables, and a CSV file for each by its own name; yield
    the files.

    Of a table without rows only its words are written, to `<stem>.md`.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    full = [table for table in tables if table.rows]
    pages, latex = (stem.with_name(f"{stem.name}.{kind}") for kind in ("md", "tex"))
    pages.write_text("\n".join(table.page() for table in tables))
    latex.write_text("\n".join(table.latex() for table in full))
    yield from (pages, latex)
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
