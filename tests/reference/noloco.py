"""NoLoCo (2506.10911): random pairs take the place of all replicas; of an odd number one is alone.

m <- beta m + alpha mean(end - outer) + gamma (mean(outer) - outer);  outer <- outer + m, with means
over the pair. A round's pairs are neighbours in a shuffled list, whose seed is its last step.
"""

import random
from collections.abc import Iterator

import torch

from tests.reference.replica import Replica, mean


def rounds(
    replicas: list[Replica], tau: int, outer_lr: float, outer_momentum: float, pull: float
) -> Iterator[None]:
    outer = [replica.weights() for replica in replicas]
    momenta = [torch.zeros_like(weights) for weights in outer]
    while True:
        for replica in replicas:
            replica.train(tau)
        for pair in drawn(len(replicas), replicas[0].steps_done):
            progress = mean(replicas[i].weights() - outer[i] for i in pair)
            middle = mean(outer[i] for i in pair)
            for i in pair:
                pulled = pull * (middle - outer[i])
                momenta[i] = outer_momentum * momenta[i] + outer_lr * progress + pulled
        outer = [weights + momentum for weights, momentum in zip(outer, momenta, strict=True)]
        for replica, weights in zip(replicas, outer, strict=True):
            replica.set_weights(weights)
        yield


def drawn(count: int, seed: int) -> list[list[int]]:
    """Pairs of so many replicas."""
    shuffled = list(range(count))
    random.Random(seed).shuffle(shuffled)
    return [shuffled[at : at + 2] for at in range(0, count, 2)]
