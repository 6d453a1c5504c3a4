"""How simulated figures are shown and kept: on the console, as CSV, as Markdown, as a picture."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from co2.errors import ConfigError, require
from co2.record.table import Table
from co2_measure.simulate.methods import NO_ROUNDS


@dataclass
class Panel:
    """A part of the picture: lines against GPUs."""

    text: str
    """What its lines show."""
    scale: str = "linear"
    """Of the values: `linear` or `log`."""
    lines: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """GPUs and the value at them, by label."""

    def add(self, line: str, gpus: int, value: float) -> None:
        """Add a point to a line."""
        self.lines.setdefault(line, []).append((gpus, value))


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
        """The panels side by side, in the format of the file's ending. The first has the legend."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            hint = "needs matplotlib: pip install matplotlib"
            raise ConfigError("--figure", name, hint) from None
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        known = sorted(FigureCanvasAgg(figure).get_supported_filetypes())
        hint = f"must end in one of {', '.join(known)}"
        require(Path(name).suffix.lstrip(".") in known, "--figure", name, hint)
        (axes,) = figure.subplots(1, len(self.panels), squeeze=False)
        for axis, panel in zip(axes, self.panels, strict=True):
            for label, line in panel.lines.items():
                axis.plot(*zip(*line, strict=True), marker="o", markersize=3, label=label)
            axis.set_xscale("log", base=2)
            axis.set_yscale(panel.scale)
            axis.set_xlabel("GPUs")
            axis.set_ylabel(panel.text)
            axis.grid(alpha=0.3)
        axes[0].legend(fontsize="small")
        figure.suptitle(self.title)
        with _writing("--figure", name) as path:
            figure.savefig(path, dpi=150)


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
