"""Kept progress (ours): CoCoD-SGD, and the momentum of the means that have arrived.

p^i_t = x^i_{t,tau} - x^i_{t,0}; its mean delta_t is taken during round t + 1. From round 1 on
u_t = clip(beta u_{t-1} + delta_{t-1} / Lambda_t, phi), and
x^i_{t+1,0} = x^i_{t,tau} + (delta_{t-1} - p^i_{t-1}) + w u_t; at t = 0 x^i_{1,0} = x^i_{0,tau}.
"""

from collections.abc import Iterator

import torch

from tests.reference.co2 import Gap, clipped
from tests.reference.replica import Replica, mean


def rounds(
    replicas: list[Replica],
    tau: int,
    outer_momentum: float,
    injection: float,
    gap_penalty: str | float = "none",
    clip: float | None = None,
    clip_mode: str = "value",
) -> Iterator[None]:
    gap = Gap(elementwise=gap_penalty == "gap_aware_elementwise")
    aware = isinstance(gap_penalty, str) and gap_penalty.startswith("gap_aware")
    constant = {"none": 1.0}.get(gap_penalty, gap_penalty)
    u = torch.zeros_like(replicas[0].weights())
    progress = None
    while True:
        starts = [replica.weights() for replica in replicas]
        for replica in replicas:
            replica.train(tau)
        gamma = replicas[0].lr()
        gap.largest_gamma = max(gap.largest_gamma, gamma)
        ends = [replica.weights() for replica in replicas]
        if progress is not None:
            delta = mean(progress)
            penalty = gap.penalty(injection * u, gamma) if aware else constant
            u = clipped(outer_momentum * u + delta / penalty, clip, clip_mode)
            for replica, end, own in zip(replicas, ends, progress, strict=True):
                replica.set_weights(end + (delta - own) + injection * u)
        progress = [end - start for start, end in zip(starts, ends, strict=True)]
        yield
