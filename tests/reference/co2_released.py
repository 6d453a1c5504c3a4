"""The released code of CO2: m_t = beta m_{t-1} + d_t / Lambda; x_{t+1,0} = x_{t,0} - alpha m_t."""

from collections.abc import Iterator

import torch

from tests.reference.replica import Replica, mean


def rounds(
    replicas: list[Replica],
    tau: int,
    outer_lr: float,
    outer_momentum: float,
    gap_penalty: float,
) -> Iterator[None]:
    start = replicas[0].weights()
    m = torch.zeros_like(start)
    while True:
        for replica in replicas:
            replica.train(tau)
        d = mean(start - replica.weights() for replica in replicas)
        m = outer_momentum * m + d / gap_penalty
        start = start - outer_lr * m
        for replica in replicas:
            replica.set_weights(start)
        yield
