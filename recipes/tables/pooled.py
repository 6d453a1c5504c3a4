"""The spread that all methods of a column share, and whether they share one.

value = method + seed + chance, without interaction; losses as logarithms. The variance of chance is
pooled over m methods and n seeds, so it has (m − 1)(n − 1) degrees of freedom; a paired test has
n − 1, which is two for three seeds, so it takes a small spread by chance for certainty.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from scipy.stats import bartlett

from recipes.tables.log_mean import LEVEL


@dataclass(frozen=True)
class Shared:
    """The chance in one column."""

    rows: frozenset[str]
    seeds: frozenset[int]
    """All rows have these."""
    variance: float
    freedom: int


def shared(values: Mapping[str, Mapping[int, float]]) -> Shared | None:
    """The spread of the rows that have all seeds which any of them has.

    None for fewer than two rows or seeds, where a row has no chance in it, as in counted figures,
    and where Bartlett's test of the residuals finds at 5 % that rows scatter unequally.
    """
    seeds = frozenset().union(*values.values())
    whole = {row: own for row, own in values.items() if own.keys() == seeds}
    freedom = (len(whole) - 1) * (len(seeds) - 1)
    if freedom < 1:
        return None
    of_seed = {seed: statistics.fmean(own[seed] for own in whole.values()) for seed in seeds}
    mean = statistics.fmean(of_seed.values())
    residuals = []
    for own in whole.values():
        of_row = statistics.fmean(own.values())
        residuals.append([value - of_row - of_seed[seed] + mean for seed, value in own.items()])
    if any(max(own) - min(own) < 1e-9 * (abs(mean) + 1e-9) for own in residuals):
        return None
    if bartlett(*residuals).pvalue < LEVEL:
        return None
    squares = sum(residual**2 for own in residuals for residual in own)
    return Shared(frozenset(whole), seeds, squares / freedom, freedom)
