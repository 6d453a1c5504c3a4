"""The values of a measured table: mean and deviation over seeds, the best, paired differences.

layout.py makes tables of them.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from scipy.stats import ttest_rel

from co2.record.table import NOT_RUN, NOTHING
from recipes.recipe import Column, Recipe, Row, Rows

LEVEL = 0.05
"""Below it, a p after Holm's correction marks a difference; intervals hold the rest, 95 %."""
LOCAL_SGD = "method=local_sgd"
"""The first override of the row that methods are compared with beside the first one."""
NOT_REACHED = "not reached"
"""Stands for an infinite value, such as the seconds to a loss that a run never had."""


@dataclass(frozen=True)
class Difference:
    """What a row has more than another one, over the seeds that both have."""

    mean: float
    other: float
    """The other row's mean over these seeds."""
    half_width: float | None = None
    """Of the 95 % t interval; None where all differences are equal, as those of counted figures
    are: then chance had no part in them."""
    p: float | None = None
    """Of the two-sided paired t-test; None without an interval."""
    significant: bool = False
    """Whether p, after the correction for all tests of its part of the recipe, is below `LEVEL`."""

    @property
    def percent(self) -> float:
        """The mean in percent of the other row's."""
        return 100 * self.mean / self.other

    def text(self, digits: int, relative: bool = False) -> str:
        """The mean, its interval, and a star where it is significant.

        Args:
            relative: in percent of the other row's mean, in place of the column's own unit.
        """
        factor, unit, digits = (100 / self.other, " %", 1) if relative else (1.0, "", digits)
        form = f"z,.{digits}f"
        mean = f"{factor * self.mean:+{form}}{unit}"
        if self.half_width is None:
            return mean
        low, high = (factor * (self.mean + sign * self.half_width) for sign in (-1, 1))
        return f"{mean} [{low:{form}}, {high:{form}}]{' *' if self.significant else ''}"


@dataclass(frozen=True)
class Entry:
    """A cell of the table: the seeds' values of a row and a column."""

    row: Row
    column: Column
    values: dict[int, float]
    """By seed."""
    to_first: Difference | None = None
    """To the first row; None for that row, and where fewer than two seeds can be compared."""
    to_local: Difference | None = None
    """To local SGD, likewise; None also where the recipe has no such row."""
    best: bool = False

    @property
    def mean(self) -> float:
        return statistics.mean(self.values.values())

    @property
    def spread(self) -> float | None:
        """Standard deviation of the sample; None for one seed, or where a seed has no number."""
        finite = all(map(math.isfinite, self.values.values()))
        return statistics.stdev(self.values.values()) if finite and len(self.values) > 1 else None

    @property
    def measured(self) -> str:
        """Mean ± standard deviation, or why there is none."""
        if not self.values:
            return NOT_RUN
        if math.isinf(self.mean):
            return NOT_REACHED
        spread = "" if self.spread is None else f" ± {self.spread:,.{self.column.digits}f}"
        return f"{self.mean:,.{self.column.digits}f}{spread}"


def by_seed(ours: Rows) -> dict[tuple[str, str], dict[int, float]]:
    """The values of a recipe's rows of results/ours.csv: by names of row and column, by seed."""
    values: dict[tuple[str, str], dict[int, float]] = {}
    for line in ours:
        seeds = values.setdefault((line["row"], line["column"]), {})
        seeds[int(line["seed"])] = float(line["value"])
    return values


def percent_above(values: dict[int, float], others: dict[int, float]) -> dict[int, float]:
    """By how many percent each value lies above the other of the same seed."""
    return {
        seed: 100 * (value / others[seed] - 1) for seed, value in values.items() if seed in others
    }


def median_ratio(values: dict[int, float], others: dict[int, float]) -> str:
    """The median of the ratios of each value to the other of the same seed, or a dash."""
    ratios = [value / others[seed] for seed, value in values.items() if seed in others]
    return f"{statistics.median(ratios):.2f}" if ratios else NOTHING


def interval_text(values: Iterable[float], digits: int = 2) -> str:
    """Mean of differences with its 95 % t interval, or the mean alone where there is none."""
    found = dict(enumerate(values))
    difference = paired(found, dict.fromkeys(found, 0.0))
    if difference is not None:
        return difference.text(digits)
    return f"{statistics.mean(found.values()):+,.{digits}f}" if found else NOTHING


def entries(recipe: Recipe, ours: Rows, scale: str) -> list[Entry]:
    """Every cell of a recipe's table, column by column, from its rows of results/ours.csv at this
    scale."""
    values = by_seed(ours)
    first, local = recipe.rows[0], local_sgd(recipe)
    found = []
    for column in recipe.columns:
        of_first, of_local = (
            values.get((row.name, column.name), {}) if row is not None else {}
            for row in (first, local)
        )
        same = []
        for row in (row for row in recipe.rows if column.takes(row, scale)):
            own = values.get((row.name, column.name), {})
            to_first = None if row is first else paired(own, of_first)
            to_local = None if row in (first, local) else paired(own, of_local)
            same.append(Entry(row, column, own, to_first, to_local))
        found += with_best(same)
    parts = dict.fromkeys(column.part for column in recipe.columns)
    return [
        entry
        for part in parts
        for entry in with_significance([e for e in found if e.column.part == part])
    ]


def local_sgd(recipe: Recipe) -> Row | None:
    """The row of local SGD, unless it is the first one."""
    others = recipe.rows[1:]
    return next((row for row in others if row.overrides[:1] == (LOCAL_SGD,)), None)


def paired(values: dict[int, float], others: dict[int, float]) -> Difference | None:
    """Mean, interval and p of the differences over the seeds that both have.

    None for fewer than two seeds, and where a seed has no number.
    """
    seeds = sorted(values.keys() & others.keys())
    own, theirs = ([one[seed] for seed in seeds] for one in (values, others))
    differences = [value - other for value, other in zip(own, theirs, strict=True)]
    if len(seeds) < 2 or not all(map(math.isfinite, differences)):
        return None
    mean, other = statistics.mean(differences), statistics.mean(theirs)
    if math.isclose(min(differences), max(differences), rel_tol=1e-9):
        return Difference(mean, other)
    test = ttest_rel(own, theirs)
    low, high = test.confidence_interval(1 - LEVEL)
    return Difference(mean, other, float(high - low) / 2, float(test.pvalue))


def with_significance(found: Sequence[Entry]) -> list[Entry]:
    """Mark the differences that are significant among all that these entries test."""
    pairs = [to for entry in found for to in (entry.to_first, entry.to_local) if to is not None]
    tests = [to.p for to in pairs if to.p is not None]
    corrected = dict(zip(tests, holm(tests), strict=True))  # equal ones are corrected alike

    def marked(to: Difference | None) -> Difference | None:
        if to is None or to.p is None:
            return to
        return replace(to, significant=corrected[to.p] < LEVEL)

    return [
        replace(entry, to_first=marked(entry.to_first), to_local=marked(entry.to_local))
        for entry in found
    ]


def holm(tests: Sequence[float]) -> list[float]:
    """The p of several tests, corrected by Holm's method, in the order given.

    The smallest is multiplied by their number, the next by one less, and so on; none becomes
    smaller than the one before it, or larger than 1.
    """
    corrected, least = [0.0] * len(tests), 0.0
    for done, at in enumerate(sorted(range(len(tests)), key=tests.__getitem__)):
        least = max(least, min(1.0, (len(tests) - done) * tests[at]))
        corrected[at] = least
    return corrected


def with_best(column: Sequence[Entry]) -> list[Entry]:
    """Mark the best mean if its interval of one deviation overlaps no other's."""
    ran = [entry for entry in column if entry.values and not entry.row.limit]
    if len(ran) < 2 or any(entry.spread is None for entry in ran):
        return list(column)
    sign = 1 if column[0].column.lower else -1
    best = min(ran, key=lambda entry: sign * entry.mean)
    clear = all(
        abs(entry.mean - best.mean) > (entry.spread or 0) + (best.spread or 0)
        for entry in ran
        if entry is not best
    )
    return [replace(entry, best=clear and entry is best) for entry in column]
