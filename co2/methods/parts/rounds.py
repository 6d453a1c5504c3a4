"""Rounds of unequal length: short ones at a high learning rate, long ones at a low one.

    τ_t ∝ (γ_max/γ_t)^p         `tau_power`; as many rounds in all as of τ steps each

Where the rate is high replicas drift apart fast. The direction is that of QSR (Gu et al., ICLR
2024, arXiv 2310.14423), whose rounds have max(H_base, ⌊(α/γ_t)²⌋) steps; here the number of means
is kept, so that both ways cost the same bytes. In a warm-up the rate that it leads to counts.
"""

from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate

_ROUNDING = 1e-12


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
