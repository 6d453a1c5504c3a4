"""What the simulator prints and keeps: a table on the console, CSV, Markdown, a figure."""

import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from co2.errors import ConfigError, require

_SHOWN: dict[str, Callable[[Any], str]] = {
    "link": str,
    "method": str,
    "tau": str,
    "gpus": "{:,}".format,
    "throughput": "{:,.0f}".format,
    "of_limit": "{:.1%}".format,
    "scaling_ratio": "{:.3f}".format,
    "step_s": "{:.4g}".format,
    "comm_s": "{:.4g}".format,
    "exposed_s": "{:.4g}".format,
    "exposed_share": "{:.1%}".format,
    "overlap": lambda share: "–" if share is None else f"{share:.3f}",
    "bytes_per_step": "{:,.0f}".format,
}
_WITHOUT_ROUNDS = ("none", "allreduce")


@dataclass(frozen=True)
class Report:
    title: str
    statement: str
    """What the figures rest on."""
    head: Sequence[str]
    cells: Sequence[Sequence[str]]
    rows: Sequence[dict[str, Any]] = field(default_factory=list)
    """The same, unrounded: what CSV and figure are made of."""

    def show(self) -> None:
        """Print the table; wider than the terminal where it must be, rather than cut."""
        table = Table(title=self.title, title_justify="left")
        for number, name in enumerate(self.head):
            table.add_column(name, justify="left" if number < 2 else "right", no_wrap=True)
        for row in self.cells:
            table.add_row(*row)
        console = Console()
        needed = Console(width=10_000).measure(table).maximum
        Console(width=max(console.width, needed)).print(table)
        console.print(
            self.statement, highlight=False, markup=False, soft_wrap=not console.is_terminal
        )

    def save(
        self, command: str, csv_to: str | None, markdown_to: str | None, figure_to: str | None
    ) -> None:
        """Write the files asked for. Raises `ConfigError` where one cannot be written."""
        if csv_to:
            with _writing("--csv", csv_to) as path, path.open("w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=list(self.rows[0]))
                writer.writeheader()
                writer.writerows(self.rows)
        if markdown_to:
            lines = [f"| {' | '.join(row)} |" for row in [self.head, *self.cells]]
            lines.insert(1, f"|{'---|' * len(self.head)}")
            parts = [f"# {self.title}", self.statement, "\n".join(lines), f"Command: `{command}`."]
            with _writing("--markdown", markdown_to) as path:
                path.write_text("\n\n".join(parts) + "\n")
        if figure_to:
            require("gpus" in self.rows[0], "--figure", figure_to, "is not drawn with --paper")
            with _writing("--figure", figure_to) as path:
                draw(self.rows, self.title, path)


def scaling(model: str, statement: str, rows: Sequence[dict[str, Any]]) -> Report:
    """The report of simulated rows (`co2.simulate.run`)."""
    cells = [[show(row[name]) for name, show in _SHOWN.items()] for row in rows]
    for row, shown in zip(rows, cells, strict=True):
        if row["method"] in _WITHOUT_ROUNDS:
            shown[list(_SHOWN).index("tau")] = "–"
    return Report(f"{model}, simulated", statement, list(_SHOWN), cells, rows)


def draw(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Throughput and scaling ratio against GPUs, a line for each link, method and τ.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the file's format.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        hint = "needs matplotlib: pip install matplotlib"
        raise ConfigError("--figure", path, hint) from None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    known = sorted(FigureCanvasAgg(figure).get_supported_filetypes())
    hint = f"must end in one of {', '.join(known)}"
    require(path.suffix.lstrip(".") in known, "--figure", path, hint)
    axes = figure.subplots(1, 2)
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        tau = "" if row["method"] in _WITHOUT_ROUNDS else f" τ={row['tau']}"
        lines.setdefault(f"{row['method']}{tau}, {row['link']}", []).append(row)
    for label, line in lines.items():
        gpus = [row["gpus"] for row in line]
        for axis, name in zip(axes, ("throughput", "scaling_ratio"), strict=True):
            axis.plot(gpus, [row[name] for row in line], marker="o", markersize=3, label=label)
    for axis, name in zip(axes, ("units per second", "scaling ratio"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("GPUs")
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    axes[0].legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


@contextmanager
def _writing(flag: str, name: str) -> Iterator[Path]:
    """The path to write, its folder made. A failure of the disk is an error of the flag."""
    path = Path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
    except OSError as error:
        raise ConfigError(flag, name, f"cannot be written: {error.strerror}") from None
