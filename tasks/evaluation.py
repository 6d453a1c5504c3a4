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


def share(num_batches: int) -> list[int]:
    """The batches that this worker's `compute` will be asked for, in that order."""
    rank, world = _place()
    return [(first + rank) % num_batches for first in range(0, num_batches, world)]


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
    return [sum(column) for column in table(compute, num_batches).T.tolist()]


def table(compute: Callable[[int], Tensor], num_batches: int) -> Tensor:
    """The rows that `total` adds: float64 [num_batches, K], row b of batch b, on all workers."""
    rank, world = _place()
    rows: Tensor | None = None
    for turn, batch in enumerate(share(num_batches)):
        row = compute(batch)
        if rows is None:
            rows = row.new_zeros(num_batches, len(row))
        if turn * world + rank < num_batches:
            rows[batch] = row
    assert rows is not None and rows.dtype == torch.float64
    if _together():
        distributed.all_reduce(rows)
    return rows


def tally(
    compute: Callable[[int], tuple[Tensor, Tensor]], num_batches: int
) -> tuple[list[float], Tensor]:
    """`total`, with counts beside the sums.

    Whole numbers add up alike in any order, so counts need no row for each batch: a confusion
    matrix of 150 classes may be among them.

    Args:
        compute: of batch b: sums, float64 [K], and counts, int64 of any one shape.
        num_batches: as for `total`.
    Returns:
        K sums, and the counts (on the device of the model), over all batches.
    """
    rank, world = _place()
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
    if _together():
        distributed.all_reduce(counts)
    return whole, counts


def _place() -> tuple[int, int]:
    """Rank and world size; a process without a group is alone."""
    if not _together():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def _together() -> bool:
    return distributed.is_available() and distributed.is_initialized()
