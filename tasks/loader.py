"""Loading of batches, one by one or in blocks, in processes of their own where that is wanted."""

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from co2.errors import ConfigError

_AHEAD = 2
"""Batches, or blocks of them, that each loading process keeps ready."""

BLOCK = 1024
"""Samples of a block, where making many at once costs less for each."""


T = TypeVar("T")


class _Made(Dataset[object]):
    def __init__(self, make: Callable[[int], object]) -> None:
        self.make = make

    def __getitem__(self, index: int) -> object:
        try:
            return self.make(index)
        except ConfigError as error:  # DataLoader would bring it over as pages of traceback
            return error


def load(
    make: Callable[[int], T], indices: Iterable[int], workers: int, device: torch.device
) -> Iterator[T]:
    """`make(index)` for each index, in their order.

    Args:
        make: a pure function of the index: tensors, or tuples or dicts of them. With workers it
            runs in forked processes, so what it has opened (files, memory maps) it shares.
        indices: of batches; may be endless.
        workers: processes that work ahead; with 0, `make` runs here when a batch is asked for.
        device: where batches go next: for a GPU, workers' batches come in pinned memory.
    Raises:
        ConfigError: what `make` raises, from a worker too.
    """
    if workers == 0:
        yield from map(make, indices)
        return
    # Unbatched: the sampler's items are whole batches. A generator of its own, or the iterator
    # would move the global one. fork: models and arrays are not copied to the workers.
    loader = DataLoader(
        _Made(make),
        batch_size=None,
        sampler=indices,
        num_workers=workers,
        prefetch_factor=_AHEAD,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),
        multiprocessing_context="fork",
    )
    for batch in loader:
        if isinstance(batch, ConfigError):
            raise batch
        # Collating and pinning make a list of a tuple.
        yield cast(T, tuple(batch) if isinstance(batch, list) else batch)


def load_blocks(
    make: Callable[[range], tuple[Tensor, ...]],
    start: int,
    size: int,
    workers: int,
    device: torch.device,
) -> Iterator[tuple[Tensor, ...]]:
    """Endless batches from number `start` on, of which `size` are made at once.

    Args:
        make: tensors for a range of batches, concatenated along the first axis. A pure function;
            the batches must not depend on how they are divided into blocks.
        size: batches in one block. Blocks begin at its multiples.
        workers, device: as for `load`, which makes whole blocks.
    Raises:
        ConfigError: as `load`.
    """
    first, passed = divmod(start, size)

    def block(number: int) -> tuple[Tensor, ...]:
        return make(range(number * size, (number + 1) * size))

    for made in load(block, count(first), workers, device):
        batches = list(zip(*(part.chunk(size) for part in made), strict=True))
        yield from batches[passed:]
        passed = 0


def batches_in_block(batch_size: int) -> int:
    """How many batches of this size make a block of about `BLOCK` samples."""
    return max(1, BLOCK // batch_size)
