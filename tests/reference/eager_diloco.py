"""Eager DiLoCo (2502.12996).

D^i_t = x^i_{t,0} - x^i_{t,tau}; Delta^i_t = mean_j D^j_{t-1} + (D^i_t - D^i_{t-1}) / G, D_{-1} = 0;
then DiLoCo's outer step with Delta^i on the replica's own start and momentum.
"""

from collections.abc import Iterator

import torch

from tests.reference.replica import Replica, mean


def rounds(
    replicas: list[Replica], tau: int, outer_lr: float, outer_momentum: float
) -> Iterator[None]:
    zeros = torch.zeros_like(replicas[0].weights())
    momenta, last = [zeros for _ in replicas], [zeros for _ in replicas]
    while True:
        starts = [replica.weights() for replica in replicas]
        for replica in replicas:
            replica.train(tau)
        now = [start - r.weights() for start, r in zip(starts, replicas, strict=True)]
        for i, replica in enumerate(replicas):
            delta = mean(last) + (now[i] - last[i]) / len(replicas)
            momenta[i] = outer_momentum * momenta[i] + delta
            replica.set_weights(starts[i] - outer_lr * (delta + outer_momentum * momenta[i]))
        last = now
        yield
