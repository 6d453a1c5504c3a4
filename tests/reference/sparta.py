"""SPARTA (EXO Labs, 2025): after every step the replicas average a few of their weights.

Of n weights, cut into k = ceil(share n) runs, chance draws one of each. The mean of what they were
comes `delay` steps later and moves each by mean - own; then the next ones are drawn.
"""

from collections.abc import Iterator
from math import ceil

import torch

from tests.reference.replica import Replica, mean


def rounds(replicas: list[Replica], share: float, delay: int) -> Iterator[None]:
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
