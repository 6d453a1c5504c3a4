"""How many times as many steps a method needs for the same loss, and where that would lead.

Percent of a loss that hardly falls any more say little of two trainings. So x = S / S_AR: a method
has its final loss after S steps, AllReduce the same one after S_AR. AllReduce's curve is one of
whole trainings, each with a schedule as long as itself; a loss amid a training is none of it.

The curve is a monotone spline of the loss over the logarithm of the rounds. A straight line would
lie above a convex curve, so that every x would be too small. A power law with a floor fits these
curves worse: it misses the left-out points of AllReduce on GPT-2 by 0.07, the spline by 0.04.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from scipy.interpolate import PchipInterpolator
from scipy.optimize import brentq
from scipy.stats import norm

from recipes.tables.log_mean import LEVEL, LogMean, percent, percent_more

Curve = Mapping[int, float]
"""Final losses, or gaps, by number of rounds."""
Curves = Mapping[int, Curve]
"""By seed."""
Points = list[tuple[float, float]]
"""Logarithm of the rounds, and loss."""


def falling(curve: Curve) -> Points:
    """The points of a curve. Neighbours between which the loss does not fall, as by chance where it
    is nearly flat, become one point, their mean."""
    groups: list[Points] = []
    for rounds, loss in sorted(curve.items()):
        groups.append([(math.log(rounds), loss)])
        while len(groups) > 1 and _mean(groups[-1])[1] >= _mean(groups[-2])[1]:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_mean(group) for group in groups]


def _mean(group: Points) -> tuple[float, float]:
    logs, losses = zip(*group, strict=True)
    return statistics.fmean(logs), statistics.fmean(losses)


def log_rounds_to(loss: float, points: Points) -> tuple[float, bool] | None:
    """The logarithm of the rounds after which a training has this loss, and whether that is
    extrapolated.

    Beyond the curve, the line of the nearest two points goes on. None for fewer than two points.
    """
    if len(points) < 2:
        return None
    logs, losses = zip(*points, strict=True)
    if losses[-1] <= loss <= losses[0]:
        spline = PchipInterpolator(logs, losses)
        return float(brentq(lambda log: spline(log) - loss, logs[0], logs[-1])), False
    (near, high), (far, low) = points[:2] if loss > losses[0] else points[-2:]
    return near + (far - near) * (high - loss) / (high - low), True


def fit_error(loss: float, points: Points) -> float:
    """Standard error of `log_rounds_to`, of the curve's form alone.

    The points beside the loss are left out in turn, and read from the rest of the curve. Without a
    point its neighbours are twice as far apart, and the error of interpolation grows with the
    square of that, so a quarter of what is missed counts. The first and the last point cannot be
    left out; 0 for fewer than three points, which tell nothing of the form.
    """
    beside = [
        at
        for at in range(1, len(points) - 1)
        if points[at + 1][1] <= loss <= points[at - 1][1]
        or (at == 1 and loss > points[0][1])
        or (at == len(points) - 2 and loss < points[-1][1])
    ]
    missed = []
    for at in beside:
        found = log_rounds_to(points[at][1], [*points[:at], *points[at + 1 :]])
        assert found is not None  # two points are left
        missed.append(found[0] - points[at][0])
    return _root_mean_square(missed) / 4


def _root_mean_square(values: list[float]) -> float:
    return math.sqrt(statistics.fmean(value**2 for value in values)) if values else 0.0


@dataclass(frozen=True)
class Ratio:
    """x after some number of rounds."""

    logs: Mapping[int, float]
    """Its logarithm, by seed."""
    extrapolated: bool
    """Whether the loss of any seed lies beyond AllReduce's curve."""
    fit_error: float = 0.0
    """Of all logarithms alike, as the form of AllReduce's curve is not known between its points."""

    @property
    def mean(self) -> LogMean:
        """With a 95 % interval of both: how seeds differ, and the error of the fit."""
        mean = LogMean.of(list(self.logs.values()))
        if mean.half_width is None:
            return mean
        of_fit = self.fit_error * float(norm.ppf(1 - LEVEL / 2))
        return replace(mean, half_width=math.hypot(mean.half_width, of_fit))


def ratio(own: Curves, base: Curves, rounds: int) -> Ratio | None:
    """x after so many rounds, over the seeds that have the loss and a curve of AllReduce's.

    Args:
        base: AllReduce's curves.
    """
    logs, errors, beyond = {}, [], False
    for seed, curve in own.items():
        points = falling(base.get(seed, {}))
        found = log_rounds_to(curve[rounds], points) if rounds in curve else None
        if found is not None:
            logs[seed] = math.log(rounds) - found[0]
            errors.append(fit_error(curve[rounds], points))
            beyond |= found[1]
    return Ratio(logs, beyond, _root_mean_square(errors)) if logs else None


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
