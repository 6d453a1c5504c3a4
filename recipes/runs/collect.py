"""From run folders to results/{ours,runs,evals}.csv: nobody types a value into a table."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from co2.errors import ConfigError
from co2.record.files import whole_lines
from co2.record.table import Table, read_csv
from recipes.recipe import Column, Recipe, Row
from recipes.runs import fingerprints, measured
from recipes.runs.cells import Cell
from recipes.runs.known import Known, key_of
from recipes.runs.measured import KEY

EVALS = (*KEY, "step", "train_s", "loss")

Line = dict[str, object]
"""A value with its run, or an evaluation, which may have been read from its file or made now."""


@dataclass(frozen=True)
class Found:
    """A value, and the evaluations of its run."""

    line: Line
    evals: Sequence[Line]
    here: bool
    """Whether the run has finished here."""


@dataclass(frozen=True)
class Finder:
    """Finds values of a scale, in run folders and in what has been collected before."""

    scale: str
    known: Known
    known_evals: Mapping[tuple[str, ...], Sequence[Mapping[str, object]]]

    def find(self, recipe: Recipe, row: Row, column: Column, seed: int, cell: Cell) -> Found | None:
        """A value of a run here, else one that has been collected. One that tells what it was
        trained on does not give way to one that does not."""
        summary = cell.summary()
        value = None if summary is None else recipe.value(row, column, self.scale, seed)
        elsewhere = self.collected(recipe, row, column, seed, cell)
        if summary is not None and value is not None:
            source = cell.source()
            if not source["fingerprint"] and elsewhere and elsewhere.line["fingerprint"]:
                return elsewhere
            key = self._key(recipe, row, column, seed)
            size = {"workers": summary["workers"], "steps": summary["steps"]}
            run = {"command": cell.command, "digest": cell.digest}
            evals = [{**key, **line} for line in _evals(Path(source["folder"]))]
            line = {**key, "value": value, **source, **size, **run}
            return Found(line, evals if column.curve else [], here=True)
        if summary is not None and column.of is None:
            return None  # the run is here and has no such figure; another run's is not its own
        return elsewhere

    def collected(
        self, recipe: Recipe, row: Row, column: Column, seed: int, cell: Cell
    ) -> Found | None:
        """What has been collected, if the recipe still asks for it."""
        same = self.known.find(recipe.name, row, column, self.scale, seed, cell)
        if same is None:
            return None
        key = self._key(recipe, row, column, seed)
        evals = [{**line, **key} for line in self.known_evals.get(key_of(same), [])]
        return Found({**same, **key}, evals if column.curve else [], here=False)

    def _key(self, recipe: Recipe, row: Row, column: Column, seed: int) -> Line:
        words = (recipe.name, row.name, column.name, self.scale, str(seed))
        return dict(zip(KEY, words, strict=True))


def collect(
    recipes: Iterable[Recipe], out: Path, scale: str, mixed: bool = False
) -> tuple[int, int]:
    """Write these files from the finished runs of these recipes at one scale; the rest stays. Lines
    have the same order whichever recipes are collected.

    A value measured elsewhere, as in a committed file, stays as long as the recipe uses the same
    command, conf gives it the same settings, and no such run has finished here. It also serves
    other recipes that read the same figure from the same run. A value that takes a second run, to
    compare with, may come from elsewhere as a whole. Warns where the mean over the seeds would mix
    the machine of runs here with another, and where values are left out because their settings are
    no longer given.

    Where the runs of a column would not have the same fingerprint (fingerprints.py), the column
    keeps what was collected before, unless `mixed`, and a line for each row says what to run.

    Returns:
        The number of values from runs that are here, and of those from elsewhere.
    Raises:
        ConfigError: columns were kept as they were. All others are written.
    """
    recipes = list(recipes)
    names = {recipe.name for recipe in recipes}
    known, old_evals = Known(out / "ours.csv"), read_csv(out / "evals.csv")
    finder = Finder(scale, known, _grouped(old_evals))
    found: list[Found] = []
    refused: list[str] = []
    for recipe in recipes:
        columns: dict[str, list[tuple[Row, Column, int, Cell]]] = {}
        for place in recipe.cells(scale):
            columns.setdefault(place[1].name, []).append(place)
        for places in columns.values():
            own = [one for place in places if (one := finder.find(recipe, *place))]
            again = fingerprints.mixed(one.line for one in own)
            if again and not mixed and any(one.here for one in own):
                own = [one for place in places if (one := finder.collected(recipe, *place))]
                refused.append(f"{recipe.name}: {places[0][1].name}")
                print(*again, sep="\n", file=sys.stderr)
            found += own
    here, elsewhere = ([one.line for one in found if one.here is place] for place in (True, False))
    kept, kept_evals = (
        [line for line in before if line["recipe"] not in names or line["scale"] != scale]
        for before in (known.lines, old_evals)
    )
    measured.write(out / "ours.csv", [*kept, *here, *elsewhere])
    every: list[Mapping[str, object]] = [
        *kept_evals,
        *(line for one in found for line in one.evals),
    ]
    Table.of_records(measured.in_order(every, EVALS), EVALS).write_csv(out / "evals.csv")
    asked = {key_of(one.line) for one in found}
    for recipe in recipes:
        _warn_of_mixtures(recipe.name, here, elsewhere)
        _warn_of_left(recipe.name, known.left(recipe.name, scale, asked))
    if refused:
        hint = (
            "would mix runs that did not train on and with the same, so the earlier values stay; "
            "run what the lines above name and collect again, or take all with --mixed"
        )
        raise ConfigError("collect", ", ".join(refused), hint)
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


def _warn_of_left(recipe: str, left: Sequence[Mapping[str, str]]) -> None:
    """Say which values go, and how they come back."""
    if left:
        rows = ", ".join(dict.fromkeys(line["row"] for line in left))
        print(
            f"warning: {recipe}: {len(left)} values are left out, for recipe and conf no longer "
            f"give their settings ({rows}); to make them: python -m recipes run {recipe}; to go "
            "back: git checkout results",
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
