"""Throughput as a share of the limit, which is the same training without communication.

A share is taken within a repeat, in which the limit was measured minutes before or after, so that a
machine that is slower on another day does not count. Whether a method is as fast as the limit is
asked by two one-sided t-tests: that its mean share is above 98 %, and that it is below 102 %.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from scipy.stats import ttest_1samp

from co2.record.table import Table
from recipes.recipe import Recipe, Rows
from recipes.tables.entries import holm
from recipes.tables.figures import slug
from recipes.tables.layout import Place, grid
from recipes.tables.log_mean import LEVEL

MARGIN = 2.0
"""Percent of the limit by which a share may differ from 100 and still count as the same."""


@dataclass(frozen=True)
class Share:
    """A method's throughput in percent of the limit's, over the repeats that both have."""

    mean: float
    half_width: float | None = None
    """Of the 95 % t interval; None for one repeat."""
    p: float | None = None
    """Of the test for equivalence: the larger p of the two; None for one repeat."""
    equivalent: bool = False
    """Whether p, after the correction for all tests of the table, is below `LEVEL`."""

    def text(self) -> str:
        """The mean, its interval, and ≈ where it is equivalent to the limit."""
        if self.half_width is None:
            return f"{self.mean:.1f} %"
        low, high = self.mean - self.half_width, self.mean + self.half_width
        return f"{self.mean:.1f} % [{low:.1f}, {high:.1f}]{' ≈' if self.equivalent else ''}"


def share_of(values: Sequence[float]) -> Share:
    """Mean, interval and p of the shares of one method, in percent."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return Share(mean)
    if min(values) == max(values):
        return Share(mean, 0.0, p=0.0 if abs(mean - 100) < MARGIN else 1.0)
    above = ttest_1samp(values, 100 - MARGIN, alternative="greater")
    below = ttest_1samp(values, 100 + MARGIN, alternative="less")
    low, high = ttest_1samp(values, 100).confidence_interval(1 - LEVEL)
    return Share(mean, float(high - low) / 2, p=float(max(above.pvalue, below.pvalue)))


def shares(recipe: Recipe, ours: Rows, part: str) -> dict[Place, Share]:
    """The share of every method in every column of a part, corrected for all of them."""
    columns = {column.name: column.head for column in recipe.columns if column.part == part}
    limit = next(row.name for row in recipe.rows if row.limit)
    values: dict[Place, dict[str, float]] = {}
    for line in ours:
        if line["column"] in columns:
            place = line["row"], columns[line["column"]]
            values.setdefault(place, {})[line["seed"]] = float(line["value"])
    found = {}
    for (row, head), own in values.items():
        whole = values.get((limit, head), {})
        repeats = sorted(own.keys() & whole.keys())
        if row != limit and repeats:
            found[row, head] = share_of([100 * own[n] / whole[n] for n in repeats])
    return _corrected(found)


def _corrected(found: Mapping[Place, Share]) -> dict[Place, Share]:
    """Mark those that are equivalent to the limit among all that are tested."""
    tests = [share.p for share in found.values() if share.p is not None]
    corrected = dict(zip(tests, holm(tests), strict=True))  # equal ones are corrected alike
    return {
        place: replace(share, equivalent=share.p is not None and corrected[share.p] < LEVEL)
        for place, share in found.items()
    }


def tables(recipe: Recipe, ours: Rows) -> Iterator[Table]:
    """A table for each part of the recipe of which anything has run."""
    for part in dict.fromkeys(column.part for column in recipe.columns):
        found = {place: share.text() for place, share in shares(recipe, ours, part).items()}
        if found:
            heads = [column.head for column in recipe.columns if column.part == part]
            yield replace(
                grid(found, [row.name for row in recipe.rows], heads),
                name=f"{recipe.name}_share_{slug(part)}",
                title=f"{recipe.title}: {part}, share of the throughput without communication",
                text="Mean over the repeats, in each of which the share is taken, with its 95 % t "
                f"interval; ≈ where the share is equivalent to 100 ± {MARGIN:g} % at 5 %, by two "
                "one-sided t-tests and Holm's correction for all tests of this table.",
            )
