"""A power law, gap = a · R^−b, through gaps by number of rounds, and how certain it is."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000
_GENERATOR_SEED = 0
_LARGEST_EXPONENT = 700.0
"""Beyond it, e to that power is no double."""


@dataclass(frozen=True)
class PowerLaw:
    """gap = a · R^−b, where R is the number of rounds."""

    a: float
    b: float

    @classmethod
    def through(cls, gaps: Mapping[int, float]) -> "PowerLaw | None":
        """Least squares in the logarithms of gaps by number of rounds.

        None for fewer than two points, and where a gap is not above 0 and so has no logarithm.
        """
        if len(gaps) < 2 or min(gaps.values()) <= 0:
            return None
        slope, offset = np.polyfit(np.log(list(gaps)), np.log(list(gaps.values())), 1)
        return cls(math.exp(offset), -float(slope))

    def gap(self, rounds: float) -> float:
        """The gap after so many rounds."""
        return self.a * rounds**-self.b

    def rounds(self, gap: float) -> float:
        """The number of rounds after which the gap is this; infinite where it does not fall."""
        if self.b <= 0:
            return math.inf
        exponent = math.log(self.a / gap) / self.b
        return math.exp(exponent) if exponent < _LARGEST_EXPONENT else math.inf


def resampled(gaps: Mapping[int, Sequence[float]]) -> list[PowerLaw]:
    """Bootstrap: laws through the means of seeds that are drawn with replacement.

    Seeds are drawn for each number of rounds by itself, because these are trainings of their own.
    The generator is fixed, so the same gaps give the same laws. Draws without a law are left out.

    Args:
        gaps: by number of rounds, the gap of every seed.
    """
    random = np.random.default_rng(_GENERATOR_SEED)
    drawn = (
        PowerLaw.through(
            {
                rounds: statistics.fmean(random.choice(values, len(values)))
                for rounds, values in gaps.items()
            }
        )
        for _ in range(RESAMPLES)
    )
    return [law for law in drawn if law is not None]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The values between which 95 % of these lie. Infinite ones are larger than all others."""
    ordered = sorted(values)
    low, high = (round(share * (len(ordered) - 1)) for share in (0.025, 0.975))
    return ordered[low], ordered[high]
