"""From run folders to results/ours.csv and results/evals.csv: nothing in a table is typed."""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from co2.record import run_folder
from recipes.cells import Cell
from recipes.recipe import Recipe

VALUES = ("recipe", "row", "column", "scale", "seed", "value")
SOURCES = ("commit", "hardware", "workers", "steps", "folder", "command")
EVALS = ("recipe", "row", "column", "scale", "seed", "step", "train_s", "value")


def collect(recipes: Iterable[Recipe], out: Path, scale: str) -> int:
    """Write both files from the finished runs of these recipes at one scale; the rest stays.

    Returns:
        The number of values.
    """
    recipes = list(recipes)
    names = {recipe.name for recipe in recipes}
    found = [finished for recipe in recipes for finished in _finished(recipe, scale)]
    values = [{**key, "value": value, **source(cell)} for key, cell, value in found]
    evals = [row for key, cell, _ in found for row in _evals(recipes, key, cell)]
    for name, fields, rows in (
        ("ours.csv", (*VALUES, *SOURCES), values),
        ("evals.csv", EVALS, evals),
    ):
        there = read(out / name)
        kept = [r for r in there if r["recipe"] not in names or r["scale"] != scale]
        _write(out / name, fields, [*kept, *rows])
    return len(values)


def _finished(recipe: Recipe, scale: str) -> Iterator[tuple[dict[str, Any], Cell, float]]:
    """Key, run and value of every cell of the table that has a finished run."""
    for row, column, seed, cell in recipe.cells(scale):
        summary = cell.summary()
        value = None if summary is None else column.value(summary)
        if value is not None:
            key = {"recipe": recipe.name, "row": row.name, "column": column.name}
            yield {**key, "scale": scale, "seed": seed}, cell, value


def source(cell: Cell) -> dict[str, Any]:
    """Which code, on what, by which command: of a finished run."""
    folder = run_folder(cell.config())
    manifest = json.loads((folder / "manifest.json").read_text())
    summary = cell.summary()
    assert summary is not None
    known, machine = manifest["git"], manifest["hardware"]
    dirty = "-dirty" if known.get("dirty") else ""
    return {
        "commit": known.get("commit", "unknown")[:7] + dirty,
        "hardware": machine["gpus"][0] if machine["gpus"] else machine["cpu"],
        "workers": summary["workers"],
        "steps": summary["steps"],
        "folder": summary["folder"],
        "command": cell.command,
    }


def _evals(recipes: Sequence[Recipe], key: dict[str, Any], cell: Cell) -> Iterator[dict[str, Any]]:
    """The evaluations of one run, of a column that is drawn."""
    recipe = next(recipe for recipe in recipes if recipe.name == key["recipe"])
    column = next(column for column in recipe.columns if column.name == key["column"])
    place, _, metric = column.metric.rpartition(".")
    if not column.curve or place != "final":
        return
    for line in (run_folder(cell.config()) / "metrics.jsonl").read_text().splitlines():
        told = json.loads(line)
        if told["kind"] == "eval" and told.get(metric) is not None:
            at = {"step": told["step"], "train_s": told["train_s"]}
            yield {**key, **at, "value": told[metric] * column.factor}


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _write(path: Path, fields: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)
