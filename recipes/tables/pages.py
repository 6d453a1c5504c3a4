"""The tables that pages of the documentation have between two marks; the report opens with them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from co2.record.table import Table, read_csv
from recipes.recipe import Rows
from recipes.runs import measured
from recipes.tables import answer

BEGIN, END = "<!-- results: begin (python -m recipes render) -->", "<!-- results: end -->"
_SCALE = "smoke"
PAGES: Mapping[str, Callable[[Rows, Rows], Sequence[Table]]] = {
    "README.md": lambda ours, tuning: (
        answer.losses(ours, tuning, _SCALE),
        answer.further(ours, tuning, _SCALE),
    ),
    "docs/quality.md": lambda ours, tuning: (answer.gaps(ours, _SCALE),),
}
"""The tables of each page, of lines of results/ours.csv and of results/tuning.csv."""


def fill(root: Path, ours: Path) -> None:
    """Replace what the pages of this folder have between their marks by the tables of ours.csv, at
    scale=smoke.

    Pages that are not there are left out. results/tuning.csv is read beside ours.csv.
    """
    rows = [row for row in measured.read(ours) if row["scale"] == _SCALE]
    tuning = read_csv(ours.with_name("tuning.csv"))
    for name, tables in PAGES.items():
        page = root / name
        if page.exists():
            page.write_text(_filled(page.read_text(), tables(rows, tuning)))


def _filled(text: str, tables: Sequence[Table]) -> str:
    parts = []
    for table in tables:
        parts += [f"**{table.title}.** {table.text}"]
        parts += [table.markdown() if table.rows else "Not run yet."]
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    middle = "\n\n".join(parts)
    return f"{before}{BEGIN}\n{middle}\n{END}{after}"
