"""Rounds that wait for their mean: every replica starts from it, or from an outer step with it."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.reference.replica import MOMENTS, Replica, average, mean


def displacement(replicas: list[Replica], start: Tensor, tau: int) -> Tensor:
    """d_t: train a round from x_{t,0}; the mean of what each has moved by, its sign changed."""
    for replica in replicas:
        replica.train(tau)
    return mean(start - replica.weights() for replica in replicas)


def begin_from(replicas: list[Replica], weights: Tensor) -> None:
    for replica in replicas:
        replica.set_weights(weights)


def local_sgd(replicas: list[Replica], tau: int) -> Iterator[None]:
    """Local SGD (Stich, 1805.09767): x_{t+1,0} = x_{t,0} - d_t, which is the mean of the ends."""
    while True:
        for replica in replicas:
            replica.train(tau)
        begin_from(replicas, mean(replica.weights() for replica in replicas))
        yield


def slowmo(
    replicas: list[Replica], tau: int, outer_lr: float, outer_momentum: float
) -> Iterator[None]:
    """SlowMo (Wang et al., 1910.00643).

    m_t = beta m_{t-1} + d_t / gamma_t;  x_{t+1,0} = x_{t,0} - alpha gamma_t m_t, with gamma_t of
    each weight's own parameter group. Where gamma_t = 0 nothing is scaled: m_t = beta m_{t-1} + d_t
    and x_{t+1,0} = x_{t,0} - alpha d_t.
    """
    start = replicas[0].weights()
    m = torch.zeros_like(start)
    while True:
        d = displacement(replicas, start, tau)
        gamma = replicas[0].lr_by_element()
        cold = gamma == 0
        m = outer_momentum * m + torch.where(cold, d, d / gamma)
        start = start - outer_lr * torch.where(cold, d, gamma * m)
        begin_from(replicas, start)
        yield


def diloco(
    replicas: list[Replica],
    tau: int,
    outer_lr: float,
    outer_momentum: float,
    average_moments: bool = False,
) -> Iterator[None]:
    """DiLoCo (2311.08105): v_t = beta v_{t-1} + d_t; x_{t+1,0} = x_{t,0} - alpha (d_t + beta v_t).

    With averaged moments it is that of Local Adam.
    """
    start = replicas[0].weights()
    v = torch.zeros_like(start)
    while True:
        d = displacement(replicas, start, tau)
        v = outer_momentum * v + d
        start = start - outer_lr * (d + outer_momentum * v)
        begin_from(replicas, start)
        for field in MOMENTS if average_moments else ():
            average(replicas, field)
        yield


def co2_released(
    replicas: list[Replica],
    tau: int,
    outer_lr: float,
    outer_momentum: float,
    gap_penalty: float,
) -> Iterator[None]:
    """CO2 as released: m_t = beta m_{t-1} + d_t / Lambda; x_{t+1,0} = x_{t,0} - alpha m_t."""
    start = replicas[0].weights()
    m = torch.zeros_like(start)
    while True:
        d = displacement(replicas, start, tau)
        m = outer_momentum * m + d / gap_penalty
        start = start - outer_lr * m
        begin_from(replicas, start)
        yield


def sparseloco(
    replicas: list[Replica], tau: int, density: float, outer_lr: float, error_decay: float
) -> Iterator[None]:
    """SparseLoCo (2508.15706): each replica sends the largest elements of its error, in few bits.

    e <- beta e + (start - end); of every 4,096 elements of a tensor the share `density` is sent,
    rounded to + or - one of two magnitudes; e <- e - sent; x <- x - alpha mean(sent). The
    magnitudes of a chunk are the means of the small and of the large ones among what is sent,
    parted by the mean of all, as bf16.
    """
    start = replicas[0].weights()
    sizes = replicas[0].sizes()
    errors = [torch.zeros_like(start) for _ in replicas]
    while True:
        sent = []
        for number, replica in enumerate(replicas):
            replica.train(tau)
            errors[number] = error_decay * errors[number] + start - replica.weights()
            sent.append(few(errors[number], sizes, density))
            errors[number] = errors[number] - sent[number]
        start = start - outer_lr * mean(sent)
        for replica in replicas:
            replica.set_weights(start)
        yield


def few(error: Tensor, sizes: list[int], density: float) -> Tensor:
    """What is sent of a vector that tensors of these sizes make up; 0 elsewhere."""
    tensors = [tensor for tensor in error.split(sizes) if len(tensor)]
    chunks = [chunk for tensor in tensors for chunk in tensor.split(4096)]
    return torch.cat([of_chunk(chunk, max(1, round(density * len(chunk)))) for chunk in chunks])


def of_chunk(chunk: Tensor, count: int) -> Tensor:
    sizes = chunk.abs().tolist()
    by_size = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    best = torch.tensor(by_size[:count])
    found = torch.zeros_like(chunk)
    found[best] = rounded(chunk[best])
    return found


def rounded(values: Tensor) -> Tensor:
    sizes = values.abs()
    small = sizes < sizes.mean()
    levels = torch.zeros_like(values)
    for members in (small, ~small):
        if members.any():
            levels[members] = sizes[members].mean().bfloat16().to(values.dtype)
    return torch.where(values < 0, -levels, levels)
