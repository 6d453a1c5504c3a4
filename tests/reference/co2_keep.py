"""Kept progress (ours): the mean of a round's progress arrives `delay` steps into the next.

delta_t is the mean of all steps of round t. When it arrives, u = beta u + delta_t and
c = c + delta_t + w u, the same on all; replica i goes on from c + kappa q^i, where q^i is the sum
of its own steps since round t ended. All steps count as progress, whatever kappa cut. Right after
round t consensus shows c + delta_t, which is still under way unless the delay is 0, as it is in
early rounds.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.reference.moments import State, correct, moments
from tests.reference.replica import Replica, mean


def rounds(
    replicas: list[Replica],
    tau: int,
    outer_momentum: float,
    momentum_weight: float,
    keep_local: float = 0.5,
    delay: int | None = None,
    average_moments: bool = False,
    blocking_share: float = 0.0,
) -> Iterator[Tensor]:
    delay = tau if delay is None else delay
    center = replicas[0].weights()
    u = torch.zeros_like(center)

    def train(steps: int) -> list[Tensor]:
        starts = [replica.weights() for replica in replicas]
        for replica in replicas:
            replica.train(steps)
        return [replica.weights() - start for replica, start in zip(replicas, starts, strict=True)]

    def arrive(delta: Tensor, since: list[Tensor], since_sent: int) -> None:
        nonlocal center, u
        u = outer_momentum * u + delta
        center = center + delta + momentum_weight * u
        for replica, own in zip(replicas, since, strict=True):
            replica.set_weights(center + keep_local * own)
        if average_moments:
            correct(replicas, sent, since_sent)

    sent: State = []
    delta = None
    while True:
        if delta is None:
            progress = train(tau)
        else:
            since = train(delay)
            arrive(delta, since, delay)
            rest = train(tau - delay)
            progress = [a + b for a, b in zip(since, rest, strict=True)]
        delta = mean(progress)
        if average_moments:
            sent = moments(replicas)
        if delay == 0 or replicas[0].is_early(blocking_share):
            arrive(delta, [torch.zeros_like(center)] * len(replicas), 0)
            delta = None
        yield center if delta is None else center + delta
