"""One table, in the forms in which results are kept: Markdown and CSV.

Recipes, benchmarks, the laboratory and the simulator all write their results with `Table`. This
module imports Python's own modules only.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NOT_RUN, NOT_AVAILABLE, NOTHING = "not run", "not available", "—"
"""What a cell says where nothing ran, where no source gives a value, and where none can be."""

Format = Callable[[Any], str]
"""How a value is written. Any: a column's values have one type, which its format knows."""


@dataclass(frozen=True)
class Table:
    """Values in rows and columns, with what a reader needs to know about them."""

    head: Sequence[str]
    """Names of the columns."""
    rows: Sequence[Sequence[object]]
    """Values as they were measured. Markdown shows them by `formats`; CSV keeps them."""
    name: str = ""
    """Name of its CSV file, where several tables are written side by side."""
    title: str = ""
    text: str = ""
    """What to know when reading the table."""
    source: str = ""
    """Where the values come from: command, commit, hardware."""
    best: frozenset[tuple[int, int]] = frozenset()
    """Row and column numbers of the values in bold."""
    formats: Mapping[str, Format] = field(default_factory=dict)
    """By column; `str` for columns without one. None is written as a dash."""

    @classmethod
    def of_records(
        cls, records: Sequence[Mapping[str, object]], head: Sequence[str] = ()
    ) -> "Table":
        """A table with a row for each record; `head` picks columns, by default all of the first."""
        names = list(head or (records[0] if records else ()))
        return cls(names, [[record[name] for name in names] for record in records])

    def texts(self, bold: str = "{}", escape: Callable[[str], str] = str) -> list[list[str]]:
        """The rows as they are shown; `bold` is the form of the best values, `escape` that of every
        value in the language of the page."""
        formats = [self.formats.get(name, str) for name in self.head]

        def text(value: object, form: Format, place: tuple[int, int]) -> str:
            shown = escape(NOTHING if value is None else form(value))
            return bold.format(shown) if place in self.best else shown

        return [
            [text(*cell, (number, at)) for at, cell in enumerate(zip(row, formats, strict=True))]
            for number, row in enumerate(self.rows)
        ]

    def markdown(self) -> str:
        """The table alone. Columns are not padded to one width, so a changed value changes one
        line."""
        head, *rows = [
            "|" + "".join(f" {cell} |" if cell else " |" for cell in line)
            for line in (self.head, *self.texts("**{}**"))
        ]
        return "\n".join([head, f"|{'---|' * len(self.head)}", *rows])

    def page(self) -> str:
        """A Markdown page: title, text, table (if it has rows) and source."""
        table = self.markdown() if self.rows else ""
        parts = [f"# {self.title}" if self.title else "", self.text, table, self.source]
        return "\n\n".join(filter(None, parts)) + "\n"

    def write_csv(self, path: Path) -> None:
        """Write the values, not their formats; None is an empty field. Makes the folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([self.head, *self.rows])


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, every value as its text; none where there is no file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
