"""Rounds that train while the mean of the round before is under way."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.reference.replica import Replica, mean


def overlap_local_sgd(
    replicas: list[Replica],
    tau: int,
    pull: float,
    outer_momentum: float,
    blocking_share: float = 0.0,
) -> Iterator[Tensor]:
    """Overlap-Local-SGD (Wang et al., 2002.09539).

    End of a round: the average started one round before arrives and moves the anchor, v <- beta v +
    (z - mean), z <- z - v; then x^i <- (1 - a) x^i + a z, and the average of the pulled x^i is
    started. The first round has no arrival and pulls to the initial weights. Consensus then shows
    the mean before the pull. Early rounds wait for the average of the x^i before the pull.
    """
    z = replicas[0].weights()
    v = torch.zeros_like(z)
    in_flight = None
    while True:
        for replica in replicas:
            replica.train(tau)
        trained = mean(replica.weights() for replica in replicas)
        early = replicas[0].is_early(blocking_share)
        if early:
            in_flight = trained
        if in_flight is not None:
            v = outer_momentum * v + (z - in_flight)
            z = z - v
        for replica in replicas:
            replica.set_weights((1 - pull) * replica.weights() + pull * z)
        in_flight = mean(replica.weights() for replica in replicas)
        if early:
            in_flight = None
        yield trained


def cocod_sgd(replicas: list[Replica], tau: int, blocking_share: float = 0.0) -> Iterator[None]:
    """CoCoD-SGD (Shen et al., 1906.12043).

    p^i_t = x^i_{t,tau} - x^i_{t,0} is averaged during round t + 1 into delta_t, and x^i_{t+1,0} =
    x^i_{t,tau} + (delta_{t-1} - p^i_{t-1}), with delta_{-1} = p_{-1} = 0. Early rounds wait for
    delta_t and take in that.
    """
    last_progress = [torch.zeros_like(replica.weights()) for replica in replicas]
    while True:
        starts = [replica.weights() for replica in replicas]
        for replica in replicas:
            replica.train(tau)
        ends = [replica.weights() for replica in replicas]
        delta = mean(last_progress)
        for replica, end, progress in zip(replicas, ends, last_progress, strict=True):
            replica.set_weights(end + (delta - progress))
        last_progress = [end - start for start, end in zip(starts, ends, strict=True)]
        if replicas[0].is_early(blocking_share):
            delta = mean(last_progress)
            for replica, start in zip(replicas, starts, strict=True):
                replica.set_weights(start + delta)
            last_progress = [torch.zeros_like(delta) for _ in replicas]
        yield


def eager_diloco(
    replicas: list[Replica],
    tau: int,
    outer_lr: float,
    outer_momentum: float,
    blocking_share: float = 0.0,
) -> Iterator[None]:
    """Eager DiLoCo (2502.12996).

    D^i_t = x^i_{t,0} - x^i_{t,tau}; Delta^i_t = mean_j D^j_{t-1} + (D^i_t - D^i_{t-1}) / G, D_{-1}
    = 0; then DiLoCo's outer step with Delta^i on the replica's own start and momentum. Early rounds
    wait: Delta_t = mean_j D^j_t, and D_t counts as 0 in the next.
    """
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
