"""What a page of the documentation and the results share: the table that a page has between two
marks, and the answer in a few points, which the report repeats."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from co2.record.table import Table, read_csv
from recipes.recipe import Rows
from recipes.runs import measured
from recipes.tables import answer

BEGIN, END = "<!-- results: begin (python -m recipes render) -->", "<!-- results: end -->"
_SCALE = "smoke"
PAGES: Mapping[str, Callable[[Rows, Rows], Table]] = {
    "README.md": lambda ours, tuning: answer.compact(ours, tuning, _SCALE),
    "docs/quality.md": lambda ours, tuning: answer.by_data(answer.gaps(ours, _SCALE)),
}
"""The table of each page, from lines of results/ours.csv and of results/tuning.csv."""


def fill(root: Path, ours: Path) -> None:
    """Replace what the pages of this folder have between their marks by the table of ours.csv, at
    scale=smoke.

    Pages that are not there are left out. results/tuning.csv is read beside ours.csv.
    """
    rows = [row for row in measured.read(ours) if row["scale"] == _SCALE]
    tuning = read_csv(ours.with_name("tuning.csv"))
    for name, table in PAGES.items():
        page = root / name
        if page.exists():
            page.write_text(_filled(page.read_text(), table(rows, tuning)))


def in_short(root: Path) -> tuple[str, list[str]] | None:
    """What docs/quality.md says in short: the words before its points, and the points.

    None where the page is not there, as where the package is installed without documentation.
    """
    page = root / "docs" / "quality.md"
    if not page.exists():
        return None
    told = page.read_text().partition("\n## In short\n")[2]
    told = told.partition(BEGIN)[0].partition("\n## ")[0]
    text, *points = (" ".join(part.split()) for part in re.split(r"^- ", told, flags=re.MULTILINE))
    return text, points


def _filled(text: str, table: Table) -> str:
    words = " ".join(filter(None, (f"**{table.title}.**", table.text)))
    shown = table.markdown() if table.rows else "Not run yet."
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{words}\n\n{shown}\n{END}{after}"
