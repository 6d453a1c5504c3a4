"""Rounds: the settings that methods with rounds have in common, and rounds of unequal length.

These are short at a high learning rate, and long at a low one:

    τ_t ∝ (γ_max/γ_t)^p         `tau_power`; as many rounds in all as of τ steps each

Where the rate is high replicas drift apart fast. The direction is that of QSR (Gu et al., ICLR
2024, arXiv 2310.14423), whose rounds have max(H_base, ⌊(α/γ_t)²⌋) steps; here the number of means
is kept, so that both ways cost the same bytes. In a warm-up the rate that it leads to counts.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from co2.errors import require
from co2.limits import Amount, Count, Inside, Limited, Share
from co2.methods.shared.auto_tau import AUTO

Tau = Count | Literal["auto"]
_ROUNDING = 1e-12


@dataclass
class Rounds(Limited):
    tau: Tau = 12
    """Inner steps of a round; auto: chosen by measurement (auto_tau.py)."""


@dataclass
class LateRounds(Rounds):
    """Of a method whose means arrive during the next round."""

    blocking_share: Share = 0.0
    """Share of the training whose rounds wait for their means. The papers: 0."""


@dataclass
class WaitingRounds(Rounds):
    """Of a method that waits for each mean."""

    comm_share: Inside = 0.1
    """With τ = auto: the largest share of a round's time that communication may take."""


@dataclass
class UnequalRounds(WaitingRounds):
    tau_power: Amount = 0.0
    """p: rounds of (γ_max/γ_t)^p steps, τ on the average (rounds.py); 0: all of τ steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.tau_power == 0 or self.tau != AUTO
        require(good, "tau_power", self.tau_power, "must be 0 with tau=auto")


@dataclass
class AveragesMoments(Limited):
    average_moments: bool = False
    """Whether the inner Adam's moments are averaged too (shared/moments.py): three times the bytes,
    and four more copies under a method that overlaps."""


def round_ends(rate: Callable[[int], float], total_steps: int, tau: int, power: float) -> list[int]:
    """After how many steps each of the ⌊total_steps/τ⌋ rounds ends.

    Args:
        rate: step index → learning rate.
        total_steps: of the training.
        tau: τ, the mean length.
        power: p; 0: all have τ steps.
    """
    rates = list(accumulate(map(rate, reversed(range(total_steps))), max))[::-1]
    highest = rates[0]
    passed = list(accumulate((one / highest) ** power if highest else 1.0 for one in rates))
    ends = [0]
    for number in range(1, total_steps // tau + 1):
        due = passed[-1] * number * tau / total_steps
        found = bisect_left(passed, due * (1 - _ROUNDING)) + 1
        ends.append(max(found, ends[-1] + 1))
    return ends[1:]
