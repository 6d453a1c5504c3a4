"""From run folders to results/ours.csv and results/evals.csv: nothing in a table is typed."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from co2.record.table import Table, read_csv
from recipes.recipe import Recipe

VALUES = ("recipe", "row", "column", "scale", "seed", "value")
SOURCES = ("commit", "hardware", "workers", "steps", "folder", "command")
KEY = VALUES[:5]
EVALS = (*KEY, "step", "train_s", "loss")


def collect(recipes: Iterable[Recipe], out: Path, scale: str) -> tuple[int, int]:
    """Write both files from the finished runs of these recipes at one scale; the rest stays.

    What was measured elsewhere, as in a committed file, stays too while the recipe asks for it by
    the same command, until there is a finished run of it here.

    Returns:
        The number of values of runs that are here, and of such others.
    """
    recipes = list(recipes)
    names = {recipe.name for recipe in recipes}
    there, evals_there = read_csv(out / "ours.csv"), read_csv(out / "evals.csv")
    known, evals_known = _by_key(there), _by_key(evals_there)
    values: list[dict[str, Any]] = []
    evals: list[dict[str, Any]] = []
    here = 0
    for recipe in recipes:
        for row, column, seed, cell in recipe.cells(scale):
            told = (recipe.name, row.name, column.name, scale, str(seed))
            key = dict(zip(KEY, told, strict=True))
            value, summary = recipe.value(row, column, scale, seed), cell.summary()
            if value is not None and summary is not None:
                here += 1
                made = {"workers": summary["workers"], "steps": summary["steps"]}
                source = {**cell.source(), **made, "command": cell.command}
                values.append({**key, "value": value, **source})
                if column.curve:
                    evals += [{**key, **line} for line in _evals(Path(source["folder"]))]
            elif told in known and known[told][0]["command"] == cell.command:
                values += known[told]
                evals += evals_known.get(told, [])
    for name, fields, old, rows in (
        ("ours.csv", (*VALUES, *SOURCES), there, values),
        ("evals.csv", EVALS, evals_there, evals),
    ):
        others = [row for row in old if row["recipe"] not in names or row["scale"] != scale]
        Table.of_records([*others, *rows], fields).write_csv(out / name)
    return here, len(values) - here


def _evals(folder: Path) -> Iterator[dict[str, Any]]:
    """The evaluations of one run that have a loss."""
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        told = json.loads(line)
        if told["kind"] == "eval" and told.get("loss") is not None:
            yield {name: told[name] for name in ("step", "train_s", "loss")}


def _by_key(rows: Iterable[dict[str, str]]) -> dict[tuple[str, ...], list[dict[str, str]]]:
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in KEY), []).append(row)
    return found
