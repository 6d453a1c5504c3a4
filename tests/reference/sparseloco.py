"""SparseLoCo (2508.15706): each replica sends the largest elements of its error, in few bits.

e <- beta e + (start - end); of every 4,096 elements of a tensor the share `density` is sent,
rounded to + or - one of two magnitudes; e <- e - sent; x <- x - alpha mean(sent). The magnitudes
of a chunk are the means of the small and of the large ones among what is sent, parted by the mean
of all, as bf16.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.reference.replica import Replica, mean


def rounds(
    replicas: list[Replica], tau: int, density: float, outer_lr: float, error_decay: float
) -> Iterator[None]:
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
