"""Methods that exchange gradients at every step: AllReduce, ACCO and DeMo."""

import math
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from itertools import product

import torch
from torch import Tensor

from tests.reference.replica import Replica, mean


def allreduce(replicas: list[Replica]) -> Iterator[None]:
    """AllReduce: gradients are averaged at every step. A round is one step."""
    while True:
        for replica in replicas:
            replica.gradients()
        average = mean(replica.gradient() for replica in replicas)
        for replica in replicas:
            replica.set_gradient(average)
            replica.update()
        yield


def acco(replicas: list[Replica]) -> Iterator[None]:
    """ACCO (2406.02613): an update learns from a half-batch at an estimate and one at the weights.

    g~ is taken at x~ while the mean for x travels, g at x while the mean of g~ travels. Then x~ =
    Opt(x, mean g~), whose step of Opt is undone, and x = Opt(x, mean of (g~ + g)/2). A round is a
    half.
    """
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
        found.append(replica.gradient())
    return found


def optimize(replicas: list[Replica], start: Tensor, gradient: Tensor) -> None:
    """A step of the inner optimizer from `start` with this gradient, on all replicas."""
    for replica in replicas:
        replica.set_weights(start)
        replica.set_gradient(gradient)
        replica.optimizer.step()


def with_rates_of(replica: Replica, state: dict) -> dict:
    """The state of before: no step changes the groups, but the rates are those of now."""
    return {**state, "param_groups": replica.optimizer.state_dict()["param_groups"]}


Sent = dict[tuple[int, ...], float]
"""Tensor, row and column of the block, row and column of the frequency → coefficient."""


def demo(replicas: list[Replica], decay: float, top_k: int, block: int) -> Iterator[None]:
    """DeMo (2411.19870): SGD of signs, of the largest coefficients of each replica's momentum.

    delta <- decay delta + gamma g; its cosine transform by blocks; the top_k largest coefficients
    of a block are sent, and leave delta. A coefficient is the mean over those that have sent it. A
    block is a divisor of the rows, at most `block`, times one of the columns. A round is one step.
    """
    deltas = [[torch.zeros(as_matrix(w).shape) for w in r.trainable()] for r in replicas]
    while True:
        messages = []
        for replica, matrices in zip(replicas, deltas, strict=True):
            replica.gradients()
            rates = [g["lr"] for g in replica.optimizer.param_groups for _ in trained(g)]
            sent: Sent = {}
            for number, weight in enumerate(replica.trainable()):
                gradient = as_matrix(weight.grad)
                matrices[number] = decay * matrices[number].to(gradient) + rates[number] * gradient
                sent |= {(number, *at): c for at, c in largest(matrices[number], top_k, block)}
                matrices[number] -= spread(sent, number, matrices[number], block)
            messages.append(sent)
        means: Sent = {}
        for at in {at for sent in messages for at in sent}:
            found = [sent[at] for sent in messages if at in sent]
            means[at] = sum(found) / len(found)
        for replica in replicas:
            for number, weight in enumerate(replica.trainable()):
                update = spread(means, number, as_matrix(weight.detach()), block).sign()
                weight.grad = update.view_as(weight).to(weight)
            replica.update()
        yield


def trained(group: dict) -> list[Tensor]:
    return [weight for weight in group["params"] if weight.requires_grad]


def as_matrix(tensor: Tensor) -> Tensor:
    """A vector is one row."""
    return tensor.reshape(len(tensor), -1) if tensor.dim() > 1 else tensor.reshape(1, -1)


def divisor(size: int, most: int) -> int:
    return max(d for d in range(1, most + 1) if size % d == 0)


@cache
def wave(frequency: int, size: int) -> Tensor:
    """Of the orthonormal cosine transform, in fp64, with the zeros of the cosine as zeros."""
    scale = math.sqrt((1 if frequency == 0 else 2) / size)
    angles = [(2 * n + 1) * frequency for n in range(size)]  # in units of pi / (2 size)
    return torch.tensor(
        [
            0.0 if a % (2 * size) == size else scale * math.cos(math.pi * a / (2 * size))
            for a in angles
        ],
        dtype=torch.float64,
    )


def places(matrix: Tensor, block: int) -> tuple[int, int, Iterator[tuple[int, int]]]:
    height, width = (divisor(size, block) for size in matrix.shape)
    rows, columns = matrix.shape[0] // height, matrix.shape[1] // width
    return height, width, product(range(rows), range(columns))


def largest(matrix: Tensor, top_k: int, block: int) -> Iterator[tuple[tuple[int, ...], float]]:
    height, width, all_blocks = places(matrix, block)
    for row, column in all_blocks:
        part = matrix[row * height :, column * width :][:height, :width].double()
        found = {
            (k, m): float(wave(k, height) @ part @ wave(m, width))
            for k, m in product(range(height), range(width))
        }
        by_size = sorted(found, key=lambda at: (-abs(found[at]), at))
        yield from (((row, column, *at), found[at]) for at in by_size[:top_k])


def spread(sent: Sent, number: int, like: Tensor, block: int) -> Tensor:
    """The matrix that coefficients of a tensor stand for."""
    height, width, _ = places(like, block)
    out = torch.zeros(like.shape, dtype=torch.float64)
    for (tensor, row, column, k, m), coefficient in sorted(sent.items()):
        if tensor == number:
            part = out[row * height :, column * width :][:height, :width]
            part += coefficient * torch.outer(wave(k, height), wave(m, width))
    return out.to(like)
