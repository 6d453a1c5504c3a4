"""How every benchmark shows and keeps its figures: a table with command, commit and hardware."""

from collections.abc import Sequence
from pathlib import Path

from co2.record.provenance import provenance
from co2.record.table import Table


def write(
    path: Path, title: str, text: str, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print a table, and write it to `path` as a Markdown page with all that repeats it needs."""
    table = Table(head=head, rows=rows, title=title, text=text, source=provenance())
    print(f"\n{title}\n\n{table.markdown()}\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table.page())
