"""The README's main table: columns of several recipes side by side, at scale=smoke."""

from pathlib import Path

from co2.record.table import Table, read_csv
from recipes.entries import Entry, entries
from recipes.methods import METHODS
from recipes.registry import RECIPES

COLUMNS = (
    ("table2", "GPT-2", "GPT-2, perplexity ↓"),
    ("table2", "RoBERTa", "RoBERTa, perplexity ↓"),
    ("table1", "ResNet-50", "ResNet-50, top-1 %"),
    ("table1", "ViT", "ViT, top-1 %"),
    ("table3", "2 workers, 100 Mbit/s", "GPT-2, tokens/s at 100 Mbit/s"),
    ("table3", "2 workers, 20 Mbit/s", "at 20 Mbit/s"),
)
"""Recipe, its column, and the README's name of that column."""
BEGIN, END = "<!-- results: begin (python -m recipes render) -->", "<!-- results: end -->"


def fill(readme: Path, ours: Path) -> None:
    """Replace the table between the README's marks."""
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text("\n".join([f"{before}{BEGIN}", table(ours).markdown(), f"{END}{after}"]))


def table(ours: Path) -> Table:
    """The main table from ours.csv: a line for each method, with the number of seeds behind ±."""
    rows = [row for row in read_csv(ours) if row["scale"] == "smoke"]
    found = {}
    for name in dict.fromkeys(recipe for recipe, *_ in COLUMNS):
        own = [row for row in rows if row["recipe"] == name]
        for entry in entries(RECIPES[name], own, []):
            found[name, entry.column.name, entry.row.name] = entry
    lines = []
    for row in METHODS:
        cells = [found[recipe, column, row.name] for recipe, column, _ in COLUMNS]
        lines.append([row.name, *map(_text, cells)])
    return Table(head=["", *(title for *_, title in COLUMNS)], rows=lines)


def _text(entry: Entry) -> str:
    """The value, bold if it is the best, and the number of its seeds."""
    value = f"**{entry.measured}**" if entry.best else entry.measured
    return f"{value} ({len(entry.values)})" if entry.values else value
