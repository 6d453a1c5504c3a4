"""What a page of the documentation and the results share: tables between two marks, numbers amid
sentences, and the answer in a few points, which the report repeats."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from co2.record.table import Table
from recipes.recipe import Rows
from recipes.runs import measured
from recipes.tables import answer, declared, experiments, headline
from recipes.tables.facts import Facts

END = "<!-- results: end -->"
SCALE = "smoke"
TABLES: Mapping[str, Callable[[Rows], Table]] = {
    "first": lambda ours: headline.at_first(ours, SCALE),
    "headline": lambda ours: headline.table(ours, SCALE),
    "losses": lambda ours: answer.by_data(answer.gaps(ours, SCALE)),
    "experiments": lambda ours: experiments.table(ours, SCALE),
    "methods": lambda _: declared.methods(),
    "refusals": lambda _: declared.refusals(),
    "shared": lambda _: declared.shared(),
}
"""By the name in the mark where a table begins, from lines of results/ours.csv. Those of
docs/methods.md have nothing measured: they are made from what methods declare."""
_TABLE = re.compile(rf"(<!-- results: begin (\w+) .*?-->).*?({re.escape(END)})", re.DOTALL)


def begin(table: str) -> str:
    """The mark where this table begins."""
    return f"<!-- results: begin {table} (python -m recipes render) -->"


def fill(root: Path, ours: Path) -> None:
    """Write the tables and numbers that pages of this folder have between marks, from ours.csv at
    scale=smoke and the tables beside it."""
    rows = [row for row in measured.read(ours) if row["scale"] == SCALE]
    told = Facts(rows, SCALE, ours.parent)
    for page in [*root.glob("*.md"), *(root / "docs").glob("*.md")]:
        text = page.read_text()
        filled = _TABLE.sub(lambda found: _filled(found, rows), text)
        filled = told.fill(filled)
        if filled != text:
            page.write_text(filled)


def in_short(root: Path) -> tuple[str, list[str]] | None:
    """What docs/results.md says in short: the words before its points, and the points.

    None where the page is not there, as where the package is installed without documentation.
    """
    page = root / "docs" / "results.md"
    if not page.exists():
        return None
    told = page.read_text().partition("\n## In short\n")[2]
    told = told.partition("<!-- results: begin")[0].partition("\n## ")[0]
    told = re.sub(r"<!--.*?-->", "", told)
    text, *points = (" ".join(part.split()) for part in re.split(r"^- ", told, flags=re.MULTILINE))
    return text, points


def _filled(found: re.Match[str], ours: Rows) -> str:
    table = TABLES[found[2]](ours)
    words = " ".join(filter(None, (f"**{table.title}.**", table.text)))
    shown = table.markdown() if table.rows else "Not run yet."
    return f"{found[1]}\n{words}\n\n{shown}\n{found[3]}"
