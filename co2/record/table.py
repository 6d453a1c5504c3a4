"""One table, in the forms in which results are kept: Markdown, LaTeX and CSV.

Recipes, benchmarks, the laboratory and the simulator all write their results with `Table`. This
module imports neither torch nor, until a table is written, pandas.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame

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
    """Values as they were measured. Markdown and LaTeX show them by `formats`; CSV keeps them."""
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

    def texts(self) -> list[list[str]]:
        """The rows as they are shown."""
        formats = [self.formats.get(name, str) for name in self.head]
        return [
            [
                NOTHING if value is None else form(value)
                for value, form in zip(row, formats, strict=True)
            ]
            for row in self.rows
        ]

    def frame(self) -> "DataFrame":
        """The values as a pandas frame. Columns keep Python's own types: no integer turns float."""
        from pandas import DataFrame

        return DataFrame([list(row) for row in self.rows], columns=list(self.head), dtype=object)

    def markdown(self) -> str:
        """The table alone.

        Columns are not padded to one width as pandas would, so a changed value changes one line.
        """
        lines = [self.head, *_with_best(self.texts(), self.best, "**{}**")]
        head, *rows = [
            "|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines
        ]
        return "\n".join([head, f"|{'---|' * len(self.head)}", *rows])

    def page(self) -> str:
        """A Markdown page: title, text, table (if it has rows) and source."""
        table = self.markdown() if self.rows else ""
        parts = [f"# {self.title}" if self.title else "", self.text, table, self.source]
        return "\n\n".join(filter(None, parts)) + "\n"

    def latex(self) -> str:
        """For the package booktabs. Where rows share a value of the first column, a rule stands
        wherever it changes."""
        cells = [[_escaped(text) for text in row] for row in self.texts()]
        cells = _with_best(cells, self.best, r"\textbf{{{}}}")
        grouped = len({row[0] for row in self.rows}) < len(self.rows)
        for number in range(len(cells) - 1, 0, -1):
            if grouped and self.rows[number][0] != self.rows[number - 1][0]:
                cells[number][0] = f"\\midrule\n{cells[number][0]}"
        shown = replace(self, head=[_escaped(name) for name in self.head], rows=cells)
        return (
            shown.frame()
            .style.hide(axis="index")
            .to_latex(
                caption=_escaped(f"{self.title}. {self.text}".strip()),
                column_format="l" * len(self.head),
                hrules=True,
                position_float="centering",
            )
        )

    def write_csv(self, path: Path) -> None:
        """Write the values, not their formats; None is an empty field. Makes the folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.frame().to_csv(path, index=False, lineterminator="\r\n")


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, every value as its text; none where there is no file."""
    if not path.exists():
        return []
    from pandas import read_csv as read

    frame = read(path, dtype=str, keep_default_na=False)
    return [dict(zip(frame.columns, row, strict=True)) for row in frame.itertuples(index=False)]


def mean_text(values: Sequence[float], form: str = ".4f", sign: str = "") -> str:
    """Mean ± standard deviation of a sample; the mean alone for one value.

    Args:
        form: format of both numbers.
        sign: "+" to write the sign of a positive mean, too.
    """
    spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}{form}}{spread}"


def _with_best(
    rows: list[list[str]], best: frozenset[tuple[int, int]], form: str
) -> list[list[str]]:
    return [
        [form.format(cell) if (number, at) in best else cell for at, cell in enumerate(row)]
        for number, row in enumerate(rows)
    ]


_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "%": r"\%",
        "_": r"\_",
        "&": r"\&",
        "#": r"\#",
        "<": "$<$",
        "≥": r"$\geq$",
        "≈": r"$\approx$",
        "±": r"$\pm$",
        "τ": r"$\tau$",
        "φ": r"$\varphi$",
        "β": r"$\beta$",
        "·": r"$\cdot$",
        "†": r"$\dagger$",
        "—": "---",
        "–": "--",
        "`": None,
    }
)
"""pandas escapes LaTeX's own characters, but knows no Greek letters and no signs."""


def _escaped(text: str) -> str:
    return text.translate(_LATEX)
