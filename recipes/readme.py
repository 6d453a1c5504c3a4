"""The README's main table: some columns of the recipes' tables, side by side, at scale=smoke."""

from collections.abc import Iterator
from pathlib import Path

from co2.record.table import read_csv
from recipes.entries import entries
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
"""Recipe, its column, and how the README calls that."""
BEGIN, END = "<!-- results: begin (python -m recipes render) -->", "<!-- results: end -->"


def fill(readme: Path, ours: Path) -> None:
    """Put the table between the README's marks."""
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text("\n".join([f"{before}{BEGIN}", *lines(ours), f"{END}{after}"]))


def lines(ours: Path) -> Iterator[str]:
    """The table in Markdown, from ours.csv."""
    rows = [row for row in read_csv(ours) if row["scale"] == "smoke"]
    found = {}
    for name in dict.fromkeys(recipe for recipe, *_ in COLUMNS):
        own = [row for row in rows if row["recipe"] == name]
        for entry in entries(RECIPES[name], own, []):
            found[name, entry.column.name, entry.row.name] = entry
    yield f"| | {' | '.join(title for *_, title in COLUMNS)} |"
    yield f"|---|{'---|' * len(COLUMNS)}"
    for row in METHODS:
        cells = [found[recipe, column, row.name] for recipe, column, _ in COLUMNS]
        told = [f"**{cell.measured}**" if cell.best else cell.measured for cell in cells]
        seeds = [f" ({len(cell.values)})" if cell.values else "" for cell in cells]
        texts = [text + number for text, number in zip(told, seeds, strict=True)]
        yield f"| {row.name} | {' | '.join(texts)} |"
