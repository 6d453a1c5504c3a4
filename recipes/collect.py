"""From run folders to results/{ours,runs,evals}.csv: nobody types a value into a table."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from co2.record.files import whole_lines
from co2.record.table import Table, read_csv
from recipes import measured
from recipes.cells import is_of
from recipes.measured import KEY
from recipes.recipe import Column, Recipe
from recipes.registry import RECIPES

EVALS = (*KEY, "step", "train_s", "loss")

Line = dict[str, object]
"""A value with its run, or an evaluation, which may have been read from its file or made now."""


def collect(recipes: Iterable[Recipe], out: Path, scale: str) -> tuple[int, int]:
    """Write these files from the finished runs of these recipes at one scale; the rest stays.

    A value measured elsewhere, as in a committed file, stays as long as the recipe uses the same
    command, conf gives it the same settings, and no such run has finished here. It also serves
    other recipes that read the same figure from the same run.

    Returns:
        The number of values from runs that are here, and of those from elsewhere.
    """
    recipes = list(recipes)
    names = {recipe.name for recipe in recipes}
    old, old_evals = measured.read(out / "ours.csv"), read_csv(out / "evals.csv")
    known, known_evals = {_key(line): line for line in old}, _grouped(old_evals)
    shared = _shared(old)
    values: list[Line] = []
    evals: list[Line] = []
    here = 0
    for recipe in recipes:
        for row, column, seed, cell in recipe.cells(scale):
            words = (recipe.name, row.name, column.name, scale, str(seed))
            key: Line = dict(zip(KEY, words, strict=True))
            summary = cell.summary()
            value = None if summary is None else recipe.value(row, column, scale, seed)
            if summary is not None and value is not None:
                here += 1
                source = cell.source()
                size = {"workers": summary["workers"], "steps": summary["steps"]}
                run = {"command": cell.command, "digest": cell.digest}
                values.append({**key, "value": value, **source, **size, **run})
                if column.curve:
                    evals += [{**key, **line} for line in _evals(Path(source["folder"]))]
            elif words in known and is_of(known[words], cell):
                values.append({**known[words]})
                evals += [{**line} for line in known_evals.get(words, [])]
            elif (same := shared.get(_figure(cell.command, column))) and is_of(same, cell):
                values.append({**same, **key})
                if column.curve:
                    evals += [{**line, **key} for line in known_evals.get(_key(same), [])]
    kept, kept_evals = (
        [line for line in before if line["recipe"] not in names or line["scale"] != scale]
        for before in (old, old_evals)
    )
    measured.write(out / "ours.csv", [*kept, *values])
    Table.of_records([*kept_evals, *evals], EVALS).write_csv(out / "evals.csv")
    return here, len(values) - here


def _evals(folder: Path) -> Iterator[Line]:
    """The evaluations of one run that have a loss; none where nothing was evaluated on the way."""
    for line in whole_lines(folder / "metrics.jsonl"):
        if line["kind"] == "eval" and line.get("loss") is not None:
            yield {name: line[name] for name in ("step", "train_s", "loss")}


def _figure(command: str, column: Column) -> tuple[object, ...]:
    """What is read from which run. A figure that depends on a second run is nobody else's."""
    return (command, column.metric, column.factor) if column.of is None else ()


def _shared(lines: Iterable[dict[str, str]]) -> dict[tuple[object, ...], dict[str, str]]:
    """Lines of ours.csv by their `_figure`, for recipes that read the same from the same runs."""
    columns = {
        (recipe.name, column.name): column
        for recipe in RECIPES.values()
        for column in recipe.columns
    }
    found = {}
    for line in lines:
        column = columns.get((line["recipe"], line["column"]))
        if column is not None and column.of is None:
            found[_figure(line["command"], column)] = line
    return found


def _key(line: dict[str, str]) -> tuple[str, ...]:
    return tuple(line[name] for name in KEY)


def _grouped(lines: Iterable[dict[str, str]]) -> dict[tuple[str, ...], list[dict[str, str]]]:
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for line in lines:
        found.setdefault(_key(line), []).append(line)
    return found
