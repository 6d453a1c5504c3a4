"""How simulated figures are shown and kept: on the console, as CSV, as Markdown, as a picture."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from co2.errors import ConfigError, require
from co2.record import drawing
from co2.record.table import Table
from co2_measure.simulate.methods import NO_ROUNDS

_THIN = 0.03
"""Lines whose values differ by no more than this share lie on each other."""


@dataclass
class Panel:
    """A part of the picture: lines against GPUs."""

    text: str
    """What its lines show."""
    scale: str = "linear"
    """Of the values: `linear` or `log`."""
    lines: dict[tuple[str, str, str], dict[int, float]] = field(default_factory=dict)
    """The value by GPUs, by group of lines, method and name."""

    def add(self, method: str, name: str, gpus: int, value: float, group: str = "") -> None:
        """Add a point to a line."""
        self.lines.setdefault((group, method, name), {})[gpus] = value

    def apart(self) -> dict[tuple[str, str], dict[int, float]]:
        """By method and label, the lines that a reader can tell apart: of those of a group that lie
        on each other, the first, with the names of all."""
        names: dict[tuple[str, str, str], list[str]] = {}
        for (group, method, name), line in self.lines.items():
            same = (key for key in names if key[0] == group and _alike(line, self.lines[key]))
            names.setdefault(next(same, (group, method, name)), []).append(name)
        return {
            (method, f"{group}: {', '.join(own)}".removeprefix(": ")): self.lines[
                group, method, name
            ]
            for (group, method, name), own in names.items()
        }


def _alike(line: Mapping[int, float], other: Mapping[int, float]) -> bool:
    return line.keys() == other.keys() and all(
        math.isclose(value, other[gpus], rel_tol=_THIN) for gpus, value in line.items()
    )


@dataclass(frozen=True)
class Report:
    """A table of simulated figures, and their picture."""

    title: str
    statement: str
    """What the figures rest on, in sentences."""
    head: Sequence[str]
    cells: Sequence[Sequence[str]]
    """The lines of the table, rounded for reading."""
    records: Sequence[Mapping[str, object]]
    """The same lines unrounded, by column: the CSV file."""
    panels: Sequence[Panel] = ()

    def show(self) -> None:
        """Print the table, wider than the terminal where it must be, rather than cut."""
        from rich.console import Console
        from rich.table import Table as ConsoleTable

        table = ConsoleTable(title=self.title, title_justify="left")
        for number, name in enumerate(self.head):
            table.add_column(name, justify="left" if number < 2 else "right", no_wrap=True)
        for line in self.cells:
            table.add_row(*line)
        console = Console()
        needed = Console(width=10_000).measure(table).maximum
        Console(width=max(console.width, needed)).print(table)
        console.print(
            self.statement, highlight=False, markup=False, soft_wrap=not console.is_terminal
        )

    def save(self, command: str, csv: str | None, markdown: str | None, figure: str | None) -> None:
        """Write the files that are named. `command` is the command line that made the report.

        Raises:
            ConfigError: a file cannot be written; the key is its flag.
        """
        if csv:
            with _writing("--csv", csv) as path:
                Table.of_records(self.records).write_csv(path)
        if markdown:
            source = f"Command: `{command}`."
            table = Table(self.head, self.cells, "", self.title, self.statement, source)
            with _writing("--markdown", markdown) as path:
                path.write_text(table.page())
        if figure:
            self._draw(figure)

    def _draw(self, name: str) -> None:
        """The panels below each other, in the format of the file's ending. One with too many lines
        is several."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            hint = "needs matplotlib: pip install matplotlib"
            raise ConfigError("--figure", name, hint) from None
        known = sorted(FigureCanvasAgg(Figure()).get_supported_filetypes())
        hint = f"must end in one of {', '.join(known)}"
        require(Path(name).suffix.lstrip(".") in known, "--figure", name, hint)
        parts = [
            (panel, part)
            for panel in self.panels
            for part in drawing.split(list(panel.apart().items()))
        ]
        titles = [self.title, *[""] * (len(parts) - 1)]
        with (
            _writing("--figure", name) as path,
            drawing.panels(path, titles, (6.5, 3.8), alike=False) as axes,
        ):
            first: dict[str, Any] = {}
            methods: dict[str, list[str]] = {}
            for axis, (panel, lines) in zip(axes, parts, strict=True):
                if first.setdefault(panel.text, axis) is not axis:
                    axis.sharey(first[panel.text])
                drawn = methods.setdefault(panel.text, [])
                for (method, label), line in lines:
                    style = drawing.look(method, drawn.count(method))
                    axis.plot(list(line), list(line.values()), label=label, **style)
                    drawn.append(method)
                axis.set_xscale("log", base=2)
                axis.set_yscale(panel.scale)
                axis.xaxis.set_major_formatter("{x:,.0f}")
                axis.yaxis.set_major_formatter("{x:,.4g}")
                axis.set_xlabel("GPUs")
                axis.set_ylabel(panel.text)


def report_of(
    title: str,
    statement: str,
    records: Sequence[Mapping[str, object]],
    formats: Mapping[str, str],
    panels: Sequence[Panel],
) -> Report:
    """A report whose table has the columns with a format, each written in it. A dash stands for
    None, and for the τ of a method without rounds."""
    cells = []
    for record in records:
        shown = {**record, "tau": None} if record["method"] in NO_ROUNDS else record
        cells.append(
            ["–" if shown[name] is None else format(shown[name], formats[name]) for name in formats]
        )
    return Report(title, statement, list(formats), cells, records, panels)


@contextmanager
def _writing(flag: str, name: str) -> Iterator[Path]:
    """The path to write, with its folder made. An `OSError` becomes a `ConfigError` of the flag."""
    path = Path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
    except OSError as error:
        raise ConfigError(flag, name, f"cannot be written: {error.strerror}") from None
