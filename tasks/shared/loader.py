"""Loading of batches, here or in loading processes."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset

from co2 import forked
from co2.errors import ConfigError

_AHEAD = 2
"""Number of batches that each loading process keeps ready."""

T = TypeVar("T")


class _Made(Dataset[object]):
    def __init__(self, make: Callable[[int], object]) -> None:
        self.make = make

    def __getitem__(self, index: int) -> object:
        try:
            return self.make(index)
        except ConfigError as error:  # DataLoader would turn it into pages of traceback
            return error


def load(
    make: Callable[[int], T], indices: Iterable[int], workers: int, device: torch.device
) -> Iterator[T]:
    """Yield `make(index)` for each index, in order.

    Args:
        make: a pure function of the index, which returns tensors, or tuples or dicts of them. With
            workers it runs in forked processes, which share its open files and memory maps.
        indices: indices of batches; there may be infinitely many.
        workers: number of loading processes; with 0, `make` runs here when a batch is asked for.
        device: where batches go next; for a GPU, loading processes return them in pinned memory.
    Raises:
        ConfigError: `make` has raised it, here or in a loading process.
    """
    if workers == 0:
        yield from map(make, indices)
        return
    # batch_size is None because each item is a whole batch. Without a generator of its own, the
    # iterator would draw from the global one. A fork copies no models or arrays to the workers.
    loader = DataLoader(
        _Made(make),
        batch_size=None,
        sampler=indices,
        num_workers=workers,
        prefetch_factor=_AHEAD,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),
        multiprocessing_context="fork",
        worker_init_fn=lambda _: forked.help_starter(),
    )
    for batch in loader:
        if isinstance(batch, ConfigError):
            raise batch
        # Collating and pinning turn a tuple into a list.
        yield cast(T, tuple(batch) if isinstance(batch, list) else batch)
