"""How simulated figures are shown and kept: a table on the console, CSV, Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from co2.errors import ConfigError
from co2.record.table import Table


@dataclass(frozen=True)
class Report:
    """A table of simulated figures."""

    title: str
    statement: str
    """What the figures rest on, in sentences."""
    head: Sequence[str]
    cells: Sequence[Sequence[str]]
    """The lines of the table, rounded for reading."""
    records: Sequence[Mapping[str, object]]
    """The same lines unrounded, by column: the CSV file."""

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

    def save(self, command: str, csv_file: str | None, markdown_file: str | None) -> None:
        """Write the files that are named.

        Args:
            command: the command line that made the report, for the Markdown file.

        Raises:
            ConfigError: a file cannot be written; the key is its flag.
        """
        if csv_file:
            with writing("--csv", csv_file) as path:
                Table.of_records(self.records).write_csv(path)
        if markdown_file:
            source = f"Command: `{command}`."
            table = Table(self.head, self.cells, "", self.title, self.statement, source)
            with writing("--markdown", markdown_file) as path:
                path.write_text(table.page())


@contextmanager
def writing(flag: str, name: str) -> Iterator[Path]:
    """The path to write, with its folder made.

    Raises:
        ConfigError: the folder or the file cannot be written; the key is the flag.
    """
    path = Path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
    except OSError as error:
        raise ConfigError(flag, name, f"cannot be written: {error.strerror}") from None
