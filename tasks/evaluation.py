"""Evaluation that gives the same figure for any number of workers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed, nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside: eval mode, no gradients. After: every module has the mode it had before."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def total(compute: Callable[[int], Tensor], num_batches: int) -> list[float]:
    """Sums over fixed batches, shared out among the workers of the default process group.

    Batch b belongs to worker b mod world. Its sums stand in row b of an otherwise zero matrix, so
    the one all-reduce adds nothing but zeros to them, and every worker adds the rows in the same
    order: the figures do not depend on the number of workers. (They do on what computes a batch:
    another GPU or another number of CPU threads may round differently.)

    Args:
        compute: sums of batch b, float64 [K], on the device of the model. Every worker calls it
            equally often, on batches that others own if need be, because the forward of a wrapped
            model (DDP, FSDP) may be collective.
        num_batches: batches of the whole validation set, 1 or more.
    Returns:
        K sums over all batches, equal on all workers.
    """
    together = distributed.is_available() and distributed.is_initialized()
    rank = distributed.get_rank() if together else 0
    world = distributed.get_world_size() if together else 1
    rows: Tensor | None = None
    for first in range(0, num_batches, world):
        batch = first + rank
        sums = compute(batch % num_batches)
        if rows is None:
            rows = sums.new_zeros(num_batches, len(sums))
        if batch < num_batches:
            rows[batch] = sums
    assert rows is not None and rows.dtype == torch.float64
    if together:
        distributed.all_reduce(rows)
    return [sum(column) for column in rows.T.tolist()]
