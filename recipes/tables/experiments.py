"""The list of experiments in docs/results.md: what each compares, and what of it has not run."""

from collections.abc import Sequence

from co2.record.table import Table
from recipes.recipe import Recipe, Rows
from recipes.registry import RECIPES
from recipes.runs.retrace import RETRACED

MOST = 3
"""Names that a cell has of rows or of columns; of more the first one."""


def table(ours: Rows, scale: str) -> Table:
    """A line for each recipe of this scale whose runs are no trials of another's."""
    known = [recipe for recipe in RECIPES.values() if scale in recipe.scales]
    trials = {f"{recipe.name}_trials" for recipe in known}
    lines, every = [], []
    for recipe in known:
        if recipe.name in trials:
            continue
        places = {(row.name, column.name) for row, column in recipe.places(scale)}
        own = [line for line in ours if line["recipe"] == recipe.name]
        values = [line for line in own if (line["row"], line["column"]) in places]
        every += values
        link = f"[{recipe.name}](../results/tables/{recipe.name}.md)"
        lines.append((link, recipe.title, f"{len(values):,}", _missing(recipe, values, scale)))
    old = sum(not line["fingerprint"] for line in every)
    retraced = sum(RETRACED in line["fingerprint"] for line in every)
    changed = sum(line["commit"].endswith("-dirty") for line in every)
    text = (
        f"Values are of all seeds, rows and columns; {old:,} of {len(every):,} have no "
        "fingerprint, because their runs are from before fingerprints were recorded. "
        f"{retraced:,} others are as old, but their commit's code was compared with a later one's "
        f"and trains alike (`recipes retrace`). {f'{changed:,} are' if changed else 'None is'} "
        "from code with changes that were not committed."
    )
    head = ("recipe", "about", "values", "not run yet")
    return Table(head, lines, title="Experiments", text=text)


def _missing(recipe: Recipe, values: Rows, scale: str) -> str:
    """The rows of which nothing has run, then those of which a run of some columns is missing."""
    runs = {column.name: column.overrides for column in recipe.columns}
    made = {(line["row"], runs[line["column"]]) for line in values}
    without: dict[tuple[str, ...], list[str]] = {}
    for row in recipe.rows:
        own = [column for column in recipe.columns if column.takes(row, scale)]
        lost = [column for column in own if (row.name, column.overrides) not in made]
        heads = dict.fromkeys(column.name.removesuffix(", loss") for column in lost)
        if lost:
            without.setdefault(() if lost == own else tuple(heads), []).append(row.name)
    if len(without.get((), ())) == len(recipe.rows):
        return "everything"
    return "; ".join(
        _names(without[columns]) + (f": {_names(columns)}" if columns else "")
        for columns in sorted(without)
    )


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more"
    return f"{names[0]}{more}" if len(names) > MOST else " · ".join(names)
