"""The values of a measured table: mean and deviation over seeds, the best, paired differences.

layout.py makes tables of them.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from scipy.stats import t

from co2.record.table import NOT_RUN, NOTHING
from recipes.recipe import Column, Recipe, Row, Rows
from recipes.tables import pooled
from recipes.tables.log_mean import LEVEL, errors, percent_more

LOCAL_SGD = "method=local_sgd"
"""The first override of the row that methods are compared with beside the first one."""
NOT_REACHED = "not reached"
"""Stands for an infinite value, such as the seconds to a loss that a run never had."""


@dataclass(frozen=True)
class Difference:
    """What a row has more than another one, over the seeds that both have."""

    mean: float
    """In the column's unit; of losses in percent, between geometric means."""
    ends: tuple[float, float] | None = None
    """Of the 95 % t interval; None where all differences are equal, as those of counted figures
    are: then chance had no part in them."""
    p: float | None = None
    """Of the two-sided t-test; None without an interval."""
    significant: bool = False
    """Whether p, after the correction for all tests of its part of the recipe, is below `LEVEL`."""
    percent: bool = False
    pooled: bool = False
    """Whether the spread is that which all rows share, in place of these differences' own."""

    def text(self, digits: int) -> str:
        """The mean, its interval, and a star where it is significant; percent with one digit."""
        unit, digits = (" %", 1) if self.percent else ("", digits)
        form = f"z,.{digits}f"
        mean = f"{self.mean:+{form}}{unit}"
        if self.ends is None:
            return mean
        low, high = self.ends
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
    difference = compared(found, dict.fromkeys(found, 0.0))
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
        rows = [row for row in recipe.rows if column.takes(row, scale)]
        spread = shared_spread(
            column, {r.name: values.get((r.name, column.name), {}) for r in rows if not r.limit}
        )
        same = []
        for row in rows:
            own = values.get((row.name, column.name), {})
            common = None if row.limit or first.limit else spread
            to_first, to_local = (
                None if row in (first, other) else compared(own, theirs, column.relative, common)
                for other, theirs in ((first, of_first), (local, of_local))
            )
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


def shared_spread(
    column: Column, values: Mapping[str, Mapping[int, float]]
) -> pooled.Shared | None:
    """The spread that the rows of a column share, if they do.

    Args:
        values: by row, by seed; a bound is no method, so it is none of them.
    """
    measured = {row: scaled(own, column.relative) for row, own in values.items() if own}
    finite = all(math.isfinite(value) for own in measured.values() for value in own.values())
    return pooled.shared(measured) if measured and finite else None


def scaled(values: Mapping[int, float], relative: bool) -> dict[int, float]:
    """The values, or their logarithms."""
    return {seed: math.log(value) if relative else value for seed, value in values.items()}


def compared(
    values: Mapping[int, float],
    others: Mapping[int, float],
    relative: bool = False,
    common: pooled.Shared | None = None,
) -> Difference | None:
    """Mean, interval and p of the differences over the seeds that both have.

    None for fewer than two seeds, and where a seed has no number.

    Args:
        relative: in percent, from differences of logarithms.
        common: the spread that all rows share, which counts where both have all its seeds.
    """
    seeds = sorted(values.keys() & others.keys())
    own, theirs = (
        scaled({seed: one[seed] for seed in seeds}, relative) for one in (values, others)
    )
    differences = [own[seed] - theirs[seed] for seed in seeds]
    if len(seeds) < 2 or not all(map(math.isfinite, differences)):
        return None
    mean = statistics.fmean(differences)
    shown = percent_more if relative else float
    if math.isclose(min(differences), max(differences), rel_tol=1e-9, abs_tol=1e-12):
        return Difference(shown(mean), percent=relative)
    error, freedom = statistics.stdev(differences) / len(seeds) ** 0.5, len(seeds) - 1
    if common is not None and common.seeds == {*seeds}:
        error, freedom = (2 * common.variance / len(seeds)) ** 0.5, common.freedom
    half = error * errors(freedom)
    return Difference(
        shown(mean),
        (shown(mean - half), shown(mean + half)),
        float(2 * t.sf(abs(mean) / error, freedom)),
        percent=relative,
        pooled=common is not None and common.seeds == {*seeds},
    )


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
