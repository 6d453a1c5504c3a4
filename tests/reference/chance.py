"""What chance draws: NoLoCo's pairs of replicas, and SPARTA's weights."""

import random
from collections.abc import Iterator
from math import ceil

import torch

from tests.reference.replica import Replica, mean


def noloco(
    replicas: list[Replica], tau: int, outer_lr: float, outer_momentum: float, pull: float
) -> Iterator[None]:
    """NoLoCo (2506.10911): random pairs take the place of all replicas; of an odd number one is
    alone.

    m <- beta m + alpha mean(end - outer) + gamma (mean(outer) - outer);  outer <- outer + m, with
    means over the pair. A round's pairs are neighbours in a shuffled list, whose seed is its last
    step.
    """
    outer = [replica.weights() for replica in replicas]
    momenta = [torch.zeros_like(weights) for weights in outer]
    while True:
        for replica in replicas:
            replica.train(tau)
        for pair in pairs(len(replicas), replicas[0].steps_done):
            progress = mean(replicas[i].weights() - outer[i] for i in pair)
            middle = mean(outer[i] for i in pair)
            for i in pair:
                pulled = pull * (middle - outer[i])
                momenta[i] = outer_momentum * momenta[i] + outer_lr * progress + pulled
        outer = [weights + momentum for weights, momentum in zip(outer, momenta, strict=True)]
        for replica, weights in zip(replicas, outer, strict=True):
            replica.set_weights(weights)
        yield


def pairs(count: int, seed: int) -> list[list[int]]:
    """Pairs of so many replicas."""
    shuffled = list(range(count))
    random.Random(seed).shuffle(shuffled)
    return [shuffled[at : at + 2] for at in range(0, count, 2)]


def sparta(replicas: list[Replica], share: float, delay: int) -> Iterator[None]:
    """SPARTA (EXO Labs, 2025): after every step the replicas average a few of their weights.

    Of n weights, cut into k = ceil(share n) runs, chance draws one of each. The mean of what they
    were comes `delay` steps later and moves each by mean - own; then the next ones are drawn.
    """
    count = len(replicas[0].weights())
    sent, places = [], []
    step = 0
    while True:
        step += 1
        for replica in replicas:
            replica.train(1)
        if step % max(delay, 1) == 0:
            if delay and sent:
                take_in(replicas, places, sent)
            places = drawn(count, ceil(share * count), step)
            sent = [replica.weights() for replica in replicas]
            if not delay:
                take_in(replicas, places, sent)
        yield


def take_in(replicas: list[Replica], places: list[int], sent: list[torch.Tensor]) -> None:
    for replica, own in zip(replicas, sent, strict=True):
        weights = replica.weights()
        for place in places:
            weights[place] += mean(other[place] for other in sent) - own[place]
        replica.set_weights(weights)


def drawn(count: int, few: int, step: int) -> list[int]:
    """One place of each of so many runs of `count` places."""
    generator = torch.Generator().manual_seed(step)
    numbers = torch.rand(few, generator=generator, dtype=torch.float64).tolist()
    begins = [run * count // few for run in range(few + 1)]
    return [
        begins[run] + int(number * (begins[run + 1] - begins[run]))
        for run, number in enumerate(numbers)
    ]
