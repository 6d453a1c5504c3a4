"""Means of logarithms with their intervals. In these, half and twice as much are as far from 1."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scipy.stats import t

LEVEL = 0.05
"""Below it, a p after Holm's correction marks a difference; intervals hold the rest, 95 %."""
Shown = Callable[[float], float]
"""From a logarithm to the value that a table shows."""


def percent(log: float) -> float:
    """The value of this logarithm, in percent."""
    return 100 * math.exp(log)


def percent_more(log: float) -> float:
    """By how many percent the value of this logarithm is above 1."""
    return 100 * math.expm1(log)


@dataclass(frozen=True)
class LogMean:
    """Mean of natural logarithms."""

    mean: float
    half_width: float | None = None
    """Of its 95 % interval; None for one value."""
    shown: Shown = math.exp

    @classmethod
    def of(cls, logs: Sequence[float], shown: Shown = math.exp) -> "LogMean":
        """With the t interval of these values, one or more."""
        mean, freedom = statistics.fmean(logs), len(logs) - 1
        if freedom == 0:
            return cls(mean, None, shown)
        error = statistics.stdev(logs) / len(logs) ** 0.5
        return cls(mean, error * errors(freedom), shown)

    @property
    def ends(self) -> tuple[float, float] | None:
        """The ends of the interval, as they are shown."""
        if self.half_width is None:
            return None
        return self.shown(self.mean - self.half_width), self.shown(self.mean + self.half_width)

    def text(self, form: str, mark: str = "", unit: str = "") -> str:
        """The mean and its interval in brackets, as in `2.42† [2.30, 2.60]`.

        Args:
            form: format of the mean; its interval has no sign.
            mark: stands behind the mean, before the unit.
        """
        mean = f"{self.shown(self.mean):{form}}{mark}{unit}"
        if self.ends is None:
            return mean
        low, high = (f"{end:{form.removeprefix('+')}}" for end in self.ends)
        return f"{mean} [{low}, {high}]"

    def overlaps(self, other: "LogMean") -> bool:
        """Whether both have intervals, which overlap as they are shown."""
        if self.ends is None or other.ends is None:
            return False
        return self.ends[0] <= other.ends[1] and other.ends[0] <= self.ends[1]


def errors(freedom: int) -> float:
    """Half the width of a 95 % t interval, in standard errors."""
    return float(t.ppf(1 - LEVEL / 2, freedom))
