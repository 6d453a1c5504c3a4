"""From run folders to results/{ours,runs,evals}.csv: nobody types a value into a table."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from co2.record.files import whole_lines
from co2.record.table import Table, read_csv
from recipes.recipe import Recipe
from recipes.runs import measured
from recipes.runs.known import Known, key_of
from recipes.runs.measured import KEY

EVALS = (*KEY, "step", "train_s", "loss")

Line = dict[str, object]
"""A value with its run, or an evaluation, which may have been read from its file or made now."""


def collect(recipes: Iterable[Recipe], out: Path, scale: str) -> tuple[int, int]:
    """Write these files from the finished runs of these recipes at one scale; the rest stays. Lines
    have the same order whichever recipes are collected.

    A value measured elsewhere, as in a committed file, stays as long as the recipe uses the same
    command, conf gives it the same settings, and no such run has finished here. It also serves
    other recipes that read the same figure from the same run. A value that takes a second run, to
    compare with, may come from elsewhere as a whole. Warns where the mean over the seeds would mix
    the machine of runs here with another.

    Returns:
        The number of values from runs that are here, and of those from elsewhere.
    """
    recipes = list(recipes)
    names = {recipe.name for recipe in recipes}
    known, old_evals = Known(out / "ours.csv"), read_csv(out / "evals.csv")
    known_evals = _grouped(old_evals)
    elsewhere: list[Line] = []
    evals: list[Line] = []
    here: list[Line] = []
    for recipe in recipes:
        for row, column, seed, cell in recipe.cells(scale):
            words = (recipe.name, row.name, column.name, scale, str(seed))
            key: Line = dict(zip(KEY, words, strict=True))
            summary = cell.summary()
            value = None if summary is None else recipe.value(row, column, scale, seed)
            if summary is not None and value is not None:
                source = cell.source()
                size = {"workers": summary["workers"], "steps": summary["steps"]}
                run = {"command": cell.command, "digest": cell.digest}
                here.append({**key, "value": value, **source, **size, **run})
                if column.curve:
                    evals += [{**key, **line} for line in _evals(Path(source["folder"]))]
            elif summary is not None and column.of is None:
                continue  # the run is here and has no such figure; another run's is not its own
            elif same := known.find(recipe.name, row, column, scale, seed, cell):
                elsewhere.append({**same, **key})
                if column.curve:
                    evals += [{**line, **key} for line in known_evals.get(key_of(same), [])]
    kept, kept_evals = (
        [line for line in before if line["recipe"] not in names or line["scale"] != scale]
        for before in (known.lines, old_evals)
    )
    measured.write(out / "ours.csv", [*kept, *here, *elsewhere])
    every: list[Mapping[str, object]] = [*kept_evals, *evals]
    Table.of_records(measured.in_order(every, EVALS), EVALS).write_csv(out / "evals.csv")
    for recipe in recipes:
        _warn_of_mixtures(recipe.name, here, elsewhere)
    return len(here), len(elsewhere)


def _warn_of_mixtures(recipe: str, here: Iterable[Line], elsewhere: Iterable[Line]) -> None:
    """Say where seeds made here are averaged with seeds of another machine, and the way back."""
    own, others = (_by_place(recipe, lines) for lines in (here, elsewhere))
    mixed = [
        place
        for place in own.keys() & others.keys()
        if len({line["hardware"] for line in (*own[place], *others[place])}) > 1
    ]
    if mixed:
        parts = (_seeds(line for place in mixed for line in made[place]) for made in (own, others))
        values = "1 table value mixes" if len(mixed) == 1 else f"{len(mixed)} table values mix"
        print(
            f"warning: {recipe}: {values} seeds of {' with seeds of '.join(parts)}; to make the "
            f"others here, too: python -m recipes run {recipe}; to go back, delete the run folders "
            "that `git diff results/runs.csv` adds, then: git checkout README.md docs results",
            file=sys.stderr,
        )


def _by_place(recipe: str, lines: Iterable[Line]) -> dict[tuple[object, object], list[Line]]:
    """The lines of a recipe, by row and column."""
    found: dict[tuple[object, object], list[Line]] = {}
    for line in lines:
        if line["recipe"] == recipe:
            found.setdefault((line["row"], line["column"]), []).append(line)
    return found


def _seeds(lines: Iterable[Line]) -> str:
    """Machines and, for each, its seeds: `a cpu, 2 cores (0, 1)`."""
    seeds: dict[str, set[int]] = {}
    for line in lines:
        seeds.setdefault(str(line["hardware"]), set()).add(int(str(line["seed"])))
    return ", ".join(
        f"{machine} ({', '.join(map(str, sorted(own)))})" for machine, own in seeds.items()
    )


def _evals(folder: Path) -> Iterator[Line]:
    """The evaluations of one run that have a loss; none where nothing was evaluated on the way."""
    for line in whole_lines(folder / "metrics.jsonl"):
        if line["kind"] == "eval" and line.get("loss") is not None:
            yield {name: line[name] for name in ("step", "train_s", "loss")}


def _grouped(lines: Iterable[dict[str, str]]) -> dict[tuple[str, ...], list[dict[str, str]]]:
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for line in lines:
        found.setdefault(key_of(line), []).append(line)
    return found
