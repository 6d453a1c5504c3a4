"""Evaluation whose figures do not depend on the number of workers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from co2.comm import collectives


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Use eval mode without gradients inside, and restore the mode of every module afterwards.

    Inside, cuDNN takes the algorithm that it expects to be fastest, and tries none: inputs may have
    many shapes, and metrics should not depend on timing.
    """
    modes = {module: module.training for module in model.modules()}
    tries = torch.backends.cudnn.benchmark
    model.eval()
    torch.backends.cudnn.benchmark = False
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.cudnn.benchmark = tries
        for module, mode in modes.items():
            module.training = mode


def share(num_batches: int) -> list[int]:
    """Return the batches for which `table` calls this worker's `compute`, in that order."""
    rank, world = collectives.place()
    return [(first + rank) % num_batches for first in range(0, num_batches, world)]


def total(compute: Callable[[int], Tensor], num_batches: int) -> list[float]:
    """Sum over fixed batches, which all workers divide. Collective.

    Batch b belongs to worker b mod world. Each worker writes the sums of its batches into their
    rows of a matrix of zeros, so that the all-reduce adds only zeros to them. Then every worker
    adds the rows in the same order, so the result does not depend on the number of workers. (It
    does depend on the hardware: another GPU or number of CPU threads may round differently.)

    Args:
        compute: returns the sums of batch b, float64 [K], on the device of the model. All workers
            call it equally often, if need be on batches that belong to others, because the forward
            pass of a wrapped model (DDP, FSDP) may be collective.
        num_batches: number of batches of the whole validation set, 1 or more.
    Returns:
        K sums over all batches, the same on all workers.
    """
    return [sum(column) for column in table(compute, num_batches).T.tolist()]


def table(compute: Callable[[int], Tensor], num_batches: int) -> Tensor:
    """Return the rows that `total` adds: float64 [num_batches, K], with row b for batch b, the same
    on all workers. Collective."""
    rank, world = collectives.place()
    rows: Tensor | None = None
    for turn, batch in enumerate(share(num_batches)):
        row = compute(batch)
        if rows is None:
            rows = row.new_zeros(num_batches, len(row))
        if turn * world + rank < num_batches:
            rows[batch] = row
    assert rows is not None and rows.dtype == torch.float64
    collectives.add_up(rows)
    return rows


def tally(
    compute: Callable[[int], tuple[Tensor, Tensor]], num_batches: int
) -> tuple[list[float], Tensor]:
    """Do what `total` does, and add up counts too. Collective.

    The sum of integers does not depend on their order, so counts need no row for each batch, and
    may be as large as a confusion matrix of 150 classes.

    Args:
        compute: returns for batch b sums, float64 [K], and counts, int64, of the same shape for all
            batches.
        num_batches: as for `total`.
    Returns:
        K sums over all batches, and the counts over all batches, on the device of the model.
    """
    rank, world = collectives.place()
    counts: Tensor | None = None
    turn = 0

    def sums(batch: int) -> Tensor:
        nonlocal counts, turn
        found, counted = compute(batch)
        assert counted.dtype == torch.int64
        if counts is None:
            counts = torch.zeros_like(counted)
        if turn * world + rank < num_batches:
            counts += counted
        turn += 1
        return found

    whole = total(sums, num_batches)
    assert counts is not None
    collectives.add_up(counts)
    return whole, counts
