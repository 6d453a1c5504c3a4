"""Overlap-Local-SGD (Wang et al., 2002.09539).

End of a round: the average started one round before arrives and moves the anchor,
v <- beta v + (z - mean), z <- z - v; then x^i <- (1 - a) x^i + a z, and the average of the pulled
x^i is started. The first round has no arrival and pulls to the initial weights. Consensus then
shows the mean before the pull. Early rounds wait for the average of the x^i before the pull.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.reference.replica import Replica, mean


def rounds(
    replicas: list[Replica],
    tau: int,
    pull: float,
    outer_momentum: float,
    blocking_share: float = 0.0,
) -> Iterator[Tensor]:
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
