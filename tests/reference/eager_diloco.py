"""Eager DiLoCo (2502.12996).

D^i_t = x^i_{t,0} - x^i_{t,tau}; Delta^i_t = mean_j D^j_{t-1} + (D^i_t - D^i_{t-1}) / G, D_{-1} = 0;
then DiLoCo's outer step with Delta^i on the replica's own start and momentum. Early rounds wait:
Delta_t = mean_j D^j_t, and D_t counts as 0 in the next.
"""

from collections.abc import Iterator

import torch

from tests.reference.replica import Replica, mean


def rounds(
    replicas: list[Replica],
    tau: int,
    outer_lr: float,
    outer_momentum: float,
    blocking_share: float = 0.0,
) -> Iterator[None]:
    zeros = torch.zeros_like(replicas[0].weights())
    momenta, last = [zeros for _ in replicas], [zeros for _ in replicas]
    while True:
        starts = [replica.weights() for replica in replicas]
        for replica in replicas:
            replica.train(tau)
        early = replicas[0].is_early(blocking_share)
        now = [start - r.weights() for start, r in zip(starts, replicas, strict=True)]
        for i, replica in enumerate(replicas):
            delta = mean(last) + (now[i] - last[i]) / len(replicas)
            if early:
                delta = mean(now)
            momenta[i] = outer_momentum * momenta[i] + delta
            replica.set_weights(starts[i] - outer_lr * (delta + outer_momentum * momenta[i]))
        last = [zeros for _ in replicas] if early else now
        yield
