"""CO2."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.reference.replica import Replica, correct, mean, moments


class Gap:
    """Lambda_t by `gap_aware`, `gap_aware_steady` and `gap_aware_elementwise`."""

    def __init__(self, kind: str | float) -> None:
        self.elementwise = kind == "gap_aware_elementwise"
        self.steady = kind == "gap_aware_steady"
        self.largest_gamma = 0.0
        self.average, self.count = 0.0, 0

    def penalty(self, movement: Tensor, gamma: float) -> Tensor | float:
        """`movement`: x_{t,0} - x_{t-1,0}; `gamma`: the inner rate at the round's last step."""
        if gamma == 0:
            return 1.0
        disp = (movement.norm() / movement.numel() ** 0.5).item()
        self.count += 1
        decayed = 1.0 if self.steady else self.largest_gamma / gamma
        self.average = 0.9 * self.average + 0.1 * disp * decayed
        c = self.average / (1 - 0.9**self.count)
        if c == 0:
            return 1.0
        return 1 + (movement.abs() if self.elementwise else disp) / c


def clipped(m: Tensor, clip: float | None, clip_mode: str) -> Tensor:
    if clip is None:
        return m
    if clip_mode == "value":
        return m.clamp(-clip, clip)
    return m * (clip / m.norm()) if m.norm() > clip else m


def co2(
    replicas: list[Replica],
    tau: int,
    outer_lr: float,
    outer_momentum: float,
    gap_penalty: str | float,
    clip: float | None = None,
    clip_mode: str = "value",
    average_moments: bool = False,
    blocking_share: float = 0.0,
) -> Iterator[Tensor]:
    """CO2 (2401.16265): SlowMo's outer step, one round late, its staleness damped.

    End of round t: d_{t-1} arrives (none at t = 0, where m stays 0), the mean of x_{t,0} -
    x^i_{t,tau} is started, m_t = clip(beta m_{t-1} + d_{t-1} / Lambda_t, phi), x_{t+1,0} = x_{t,0}
    - alpha m_t. Consensus then shows the mean of the ends, x_{t,0} - d_t. Early rounds wait: m_t
    takes in d_t with Lambda_t = 1, and consensus shows x_{t+1,0}. Where nothing arrives, x and m
    stay.
    """
    gap = Gap(gap_penalty)
    constant = {"none": 1.0}.get(gap_penalty, gap_penalty)
    x = previous_x = replicas[0].weights()
    m = torch.zeros_like(x)
    in_flight = moments_in_flight = None
    while True:
        for replica in replicas:
            replica.train(tau)
        trained = mean(replica.weights() for replica in replicas)
        gamma = replicas[0].lr()
        gap.largest_gamma = max(gap.largest_gamma, gamma)
        arrived, in_flight = in_flight, mean(x - replica.weights() for replica in replicas)
        waits = replicas[0].is_early(blocking_share)
        previous = x
        if waits:
            m = clipped(outer_momentum * m + in_flight, clip, clip_mode)
            x = trained = x - outer_lr * m
            in_flight = None
        elif arrived is not None:
            aware = isinstance(gap_penalty, str) and gap_penalty.startswith("gap_aware")
            penalty = gap.penalty(x - previous_x, gamma) if aware else constant
            m = clipped(outer_momentum * m + arrived / penalty, clip, clip_mode)
            x = x - outer_lr * m
        previous_x = x if waits else previous
        for replica in replicas:
            replica.set_weights(x)
        if average_moments:
            if moments_in_flight is not None:
                correct(replicas, moments_in_flight, tau)
            moments_in_flight = moments(replicas)
            if waits:
                correct(replicas, moments_in_flight, 0)
                moments_in_flight = None
        yield trained
