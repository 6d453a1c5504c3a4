"""Differences to the first row with a spread that all methods share, beside the paired tests.

For every task, log loss = method + seed + chance, without interaction. The variance of chance is
pooled over all methods, so m methods and n seeds leave it (m − 1)(n − 1) degrees of freedom; a
paired test has n − 1, which is two for three seeds.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from scipy.stats import t

from co2.record.table import Table
from recipes.recipe import Recipe, Rows
from recipes.tables.entries import LEVEL, by_seed, holm
from recipes.tables.layout import Place, grid
from recipes.tables.log_mean import LogMean, errors, percent_more

ALL_TASKS = "all tasks"
Losses = Mapping[str, Mapping[int, float]]
"""Of one task: by method, by seed."""


@dataclass(frozen=True)
class Effect:
    """A method's log loss above that of the first row."""

    log: LogMean
    p: float


def effects(losses: Losses, first: str) -> dict[str, Effect]:
    """Every method's difference to the first one, over the seeds that all of them have.

    Empty where the first has no values, and for fewer than two methods or seeds.
    """
    seeds = sorted(set.intersection(*(set(own) for own in losses.values()))) if losses else []
    freedom = (len(losses) - 1) * (len(seeds) - 1)
    if first not in losses or freedom < 1:
        return {}
    logs = {row: {seed: math.log(own[seed]) for seed in seeds} for row, own in losses.items()}
    of_row = {row: statistics.fmean(own.values()) for row, own in logs.items()}
    of_seed = {seed: statistics.fmean(own[seed] for own in logs.values()) for seed in seeds}
    whole = statistics.fmean(of_row.values())
    squares = sum(
        (log - of_row[row] - of_seed[seed] + whole) ** 2
        for row, own in logs.items()
        for seed, log in own.items()
    )
    error = math.sqrt(2 * squares / freedom / len(seeds))
    return {
        row: _effect(mean - of_row[first], error, freedom)
        for row, mean in of_row.items()
        if row != first
    }


def over_tasks(logs: list[float]) -> Effect | None:
    """The mean of a method's differences on several tasks, which are the units; None for one."""
    if len(logs) < 2:
        return None
    return _effect(statistics.fmean(logs), statistics.stdev(logs) / len(logs) ** 0.5, len(logs) - 1)


def _effect(mean: float, error: float, freedom: int) -> Effect:
    log = LogMean(mean, error * errors(freedom), percent_more)
    return Effect(log, float(2 * t.sf(abs(mean) / error, freedom)) if error else float(not mean))


def tables(recipe: Recipe, ours: Rows) -> Iterator[Table]:
    """The table of a recipe's losses, from its rows of results/ours.csv; none where nothing can be
    compared."""
    first, values = recipe.rows[0].name, by_seed(ours)
    found: dict[Place, Effect] = {}
    columns = [column for column in recipe.columns if column.part == "loss"]
    for column in columns:
        losses = {
            row.name: values[row.name, column.name]
            for row in recipe.rows
            if (row.name, column.name) in values
        }
        own = effects(losses, first)
        found |= {(row, column.head): effect for row, effect in own.items()}
    for row in recipe.rows:
        logs = [found[row.name, c.head].log.mean for c in columns if (row.name, c.head) in found]
        mean = over_tasks(logs)
        if mean is not None:
            found[row.name, ALL_TASKS] = mean
    if not found:
        return
    corrected = dict(zip(found, holm([effect.p for effect in found.values()]), strict=True))
    cells = {
        place: effect.log.text("+z.1f", unit=" %") + (" *" if corrected[place] < LEVEL else "")
        for place, effect in found.items()
    }
    heads = [*(column.head for column in columns), ALL_TASKS]
    yield replace(
        grid(cells, [row.name for row in recipe.rows], heads),
        name=f"{recipe.name}_pooled",
        title=f"{recipe.title}: loss, differences to {first} with a spread that all methods share",
        text="Three seeds leave a paired test two degrees of freedom, so it finds large "
        "differences only. Here log loss = method + seed + chance, over the seeds that all methods "
        "of the column have, and the variance of chance is pooled over all m methods: with n seeds "
        "(m − 1)(n − 1) degrees of freedom. This assumes that all methods scatter alike; where one "
        "scatters more, its own stars are too many and the others' too few. Percent between "
        "geometric means, with 95 % intervals; a star where the difference is significant at 5 % "
        f"after Holm's correction for all tests of this table. {ALL_TASKS.capitalize()}: the mean "
        "of the tasks' log differences, with a t interval in which the tasks are the units: what a "
        "further task like these would show.",
    )
