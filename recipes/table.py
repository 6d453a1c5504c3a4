"""A table as text, in the forms in which it is read: Markdown, LaTeX, CSV (report.py: HTML)."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

NOT_RUN, NOT_AVAILABLE, NOTHING = "not run", "not available", "—"


@dataclass(frozen=True)
class Table:
    name: str
    """Of its files."""
    title: str
    text: str
    """What to know when reading it."""
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    source: str
    """Where the values come from."""
    best: frozenset[tuple[int, int]] = frozenset()
    """Row and column of what is told in bold."""


def markdown(table: Table) -> str:
    rows = [f"| {' | '.join(table.head)} |", f"|{'---|' * len(table.head)}"]
    for cells in _marked(table, "**{}**"):
        rows.append(f"| {' | '.join(cells)} |")
    body = "\n".join(rows)
    return f"# {table.title}\n\n{table.text}\n\n{body}\n\n{table.source}\n"


def latex(table: Table) -> str:
    """For booktabs, with a rule between the values of the first column."""
    escaped = Table(
        table.name,
        _escaped(table.title),
        _escaped(table.text),
        [_escaped(name) for name in table.head],
        [[_escaped(cell) for cell in row] for row in table.rows],
        _escaped(table.source),
        table.best,
    )
    lines = []
    for number, cells in enumerate(_marked(escaped, r"\textbf{{{}}}")):
        if number and table.rows[number][0] != table.rows[number - 1][0]:
            lines.append(r"\midrule")
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escaped.title}. {escaped.text}}}",
            rf"\begin{{tabular}}{{{'l' * len(table.head)}}}",
            r"\toprule",
            " & ".join(escaped.head) + r" \\",
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def write(tables: Sequence[Table], stem: Path) -> None:
    """`<stem>.md` and `.tex` with all of them, and a CSV file for each, by its name."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_name(f"{stem.name}.md").write_text("\n".join(markdown(table) for table in tables))
    stem.with_name(f"{stem.name}.tex").write_text("\n".join(latex(table) for table in tables))
    for table in tables:
        with stem.with_name(f"{table.name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(table.head)
            writer.writerows(table.rows)


def _marked(table: Table, form: str) -> Iterator[list[str]]:
    """The rows, with the best cells in this form."""
    for number, row in enumerate(table.rows):
        yield [
            form.format(cell) if (number, at) in table.best else cell for at, cell in enumerate(row)
        ]


def _escaped(text: str) -> str:
    for plain, written in (
        ("\\", r"\textbackslash{}"),
        ("%", r"\%"),
        ("_", r"\_"),
        ("&", r"\&"),
        ("#", r"\#"),
        ("<", "$<$"),
        ("±", r"$\pm$"),
        ("τ", r"$\tau$"),
        ("φ", r"$\varphi$"),
        ("·", r"$\cdot$"),
        ("†", r"$\dagger$"),
        ("—", "---"),
        ("–", "--"),
        ("`", ""),
    ):
        text = text.replace(plain, written)
    return text
