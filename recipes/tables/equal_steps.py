"""How many times as many steps a method needs for the same loss, and where that would lead.

Percent of a loss that hardly falls any more say little of two trainings. So x = S / S_AR: a method
has its final loss after S steps, AllReduce the same one after S_AR. AllReduce's curve is one of
whole trainings, each with a schedule as long as itself; a loss amid a training is none of it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from recipes.tables.log_mean import LogMean, percent, percent_more

Curve = Mapping[int, float]
"""Final losses, or gaps, by number of rounds."""
Curves = Mapping[int, Curve]
"""By seed."""


def log_rounds_to(loss: float, curve: Curve) -> tuple[float, bool] | None:
    """The logarithm of the rounds after which a training has this loss, and whether that is
    extrapolated.

    Between two neighbours the loss is linear in the logarithm of the rounds; beyond the curve, the
    line of the nearest two goes on. None for fewer than two points, and where losses do not fall.
    """
    points = sorted(curve.items())
    pieces = list(pairwise(points))
    if not pieces or any(after >= before for (_, before), (_, after) in pieces):
        return None
    (near, high), (far, low) = next((p for p in pieces if loss >= p[1][1]), pieces[-1])
    rounds = math.log(near) + math.log(far / near) * (high - loss) / (high - low)
    return rounds, not points[-1][1] <= loss <= points[0][1]


@dataclass(frozen=True)
class Ratio:
    """x after some number of rounds."""

    logs: Mapping[int, float]
    """Its logarithm, by seed."""
    extrapolated: bool
    """Whether the loss of any seed lies beyond AllReduce's curve."""

    @property
    def mean(self) -> LogMean:
        return LogMean.of(list(self.logs.values()))


def ratio(own: Curves, base: Curves, rounds: int) -> Ratio | None:
    """x after so many rounds, over the seeds that have the loss and a curve of AllReduce's.

    Args:
        base: AllReduce's curves.
    """
    logs, beyond = {}, False
    for seed, curve in own.items():
        found = log_rounds_to(curve[rounds], base.get(seed, {})) if rounds in curve else None
        if found is not None:
            logs[seed] = math.log(rounds) - found[0]
            beyond |= found[1]
    return Ratio(logs, beyond) if logs else None


def exponent(curve: Curve) -> float:
    """b of the power law c · R^−b through the last two points."""
    (early, before), (late, after) = sorted(curve.items())[-2:]
    return math.log(before / after) / math.log(late / early)


def at_steady_ratio(own: Curves, base: Curves) -> LogMean | None:
    """Percent above AllReduce after any number of rounds beyond those measured, if x stays what it
    was last and AllReduce's loss falls by the power law of its last two points.

    AllReduce's loss after S / x rounds is then x^b times that after S, whatever S is.
    """
    last = ratio(own, base, max((rounds for curve in own.values() for rounds in curve), default=0))
    if last is None:
        return None
    ratios = [exponent(base[seed]) * log for seed, log in last.logs.items()]
    return LogMean.of(ratios, percent_more)


def gap_exponents(own: Curves, base: Curves) -> dict[int, tuple[float, int, float]]:
    """By seed: the exponent of the gap's last two points, and the last point: rounds and gap.

    A gap is the loss over AllReduce's of the same seed, less 1. Seeds with fewer than two are left
    out. Empty where one of those points is not above 0, and so has no logarithm.
    """
    found = {}
    for seed, curve in own.items():
        others = base.get(seed, {})
        gaps = {r: loss / others[r] - 1 for r, loss in curve.items() if r in others}
        last = dict(sorted(gaps.items())[-2:])
        if len(last) == 2:
            if min(last.values()) <= 0:
                return {}
            rounds = max(last)
            found[seed] = exponent(last), rounds, last[rounds]
    return found


def at_steady_exponent(own: Curves, base: Curves, rounds: int) -> LogMean | None:
    """Percent above AllReduce after so many rounds, if the gap goes on as between its last two
    points."""
    logs = [
        math.log(gap) - b * math.log(rounds / last)
        for b, last, gap in gap_exponents(own, base).values()
    ]
    return LogMean.of(logs, percent) if logs else None
