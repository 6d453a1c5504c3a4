"""DiLoCo (2311.08105): v_t = beta v_{t-1} + d_t; x_{t+1,0} = x_{t,0} - alpha (d_t + beta v_t)."""

from collections.abc import Iterator

import torch

from tests.reference.moments import FIELDS, average
from tests.reference.replica import Replica, mean


def rounds(
    replicas: list[Replica],
    tau: int,
    outer_lr: float,
    outer_momentum: float,
    average_moments: bool = False,
) -> Iterator[None]:
    start = replicas[0].weights()
    v = torch.zeros_like(start)
    while True:
        for replica in replicas:
            replica.train(tau)
        d = mean(start - replica.weights() for replica in replicas)
        v = outer_momentum * v + d
        start = start - outer_lr * (d + outer_momentum * v)
        for replica in replicas:
            replica.set_weights(start)
        for field in FIELDS if average_moments else ():
            average(replicas, field)
        yield
