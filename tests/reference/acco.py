"""ACCO (2406.02613): an update learns from a half-batch at an estimate and one at the weights.

g~ is taken at x~ while the mean for x travels, g at x while the mean of g~ travels. Then x~ =
Opt(x, mean g~), whose step of Opt is undone, and x = Opt(x, mean of (g~ + g)/2). A round is a half.
"""

from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import Tensor

from tests.reference.replica import Replica, mean


def rounds(replicas: list[Replica]) -> Iterator[None]:
    x = replicas[0].weights()
    first = half_batch(replicas)
    yield
    while True:
        second = half_batch(replicas, x)
        states = [deepcopy(replica.optimizer.state_dict()) for replica in replicas]
        optimize(replicas, x, mean(first))  # the estimate
        for replica, state in zip(replicas, states, strict=True):
            replica.optimizer.load_state_dict(with_rates_of(replica, state))
        yield
        both = mean((a + b) / 2 for a, b in zip(first, second, strict=True))
        first = half_batch(replicas)
        optimize(replicas, x, both)
        x = replicas[0].weights()
        yield


def half_batch(replicas: list[Replica], at: Tensor | None = None) -> list[Tensor]:
    """Each replica's gradient, taken where it is, which is `at` if that is given."""
    found = []
    for replica in replicas:
        assert at is None or torch.equal(replica.weights(), at)
        replica.gradients()
        replica.steps_done += 1
        found.append(torch.cat([weight.grad.reshape(-1) for weight in replica.trainable()]))
    return found


def optimize(replicas: list[Replica], start: Tensor, gradient: Tensor) -> None:
    """A step of the inner optimizer from `start` with this gradient, on all replicas."""
    for replica in replicas:
        replica.set_weights(start)
        weights = replica.trainable()
        for weight, part in zip(weights, gradient.split([w.numel() for w in weights]), strict=True):
            weight.grad = part.clone().view_as(weight)
        replica.optimizer.step()


def with_rates_of(replica: Replica, state: dict) -> dict:
    """The state of before: no step changes the groups, but the rates are those of now."""
    return {**state, "param_groups": replica.optimizer.state_dict()["param_groups"]}
