"""Loading of batches, here or in loading processes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from co2.errors import ConfigError, first_line
from co2.start import processes

_AHEAD = 2
"""Number of batches that each loading process keeps ready."""

T = TypeVar("T")


class _Made(Dataset[object]):
    """Batches in shared memory: DataLoader, which would put them there later, in a thread, would
    wait for ever for one that has no room."""

    def __init__(self, make: Callable[[int], object], workers: int) -> None:
        self.make, self.workers = make, workers

    def __getitem__(self, index: int) -> object:
        try:
            batch = self.make(index)
            parts = [part for part in tree_leaves(batch) if isinstance(part, Tensor)]
            try:
                for part in parts:
                    part.share_memory_()
            except RuntimeError as error:
                raise self._no_room(parts, error) from None
        except ConfigError as error:  # DataLoader would turn it into pages of traceback
            return error
        return batch

    def _no_room(self, parts: Sequence[Tensor], error: RuntimeError) -> ConfigError:
        mb, ahead = sum(part.nbytes for part in parts) / 1e6, self.workers * _AHEAD
        reason = first_line(error).rpartition(": ")[2]
        where = f"/dev/shm does not take a batch of {mb:.3g} MB ({reason}), and each worker keeps "
        mend = f"{ahead} there; make it larger (docker run --shm-size=16g), or use data.workers=0"
        return ConfigError("data.workers", self.workers, where + mend)


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
        ConfigError: `make` has raised it, here or in a loading process; or a batch has no room,
            or a process cannot start.
    """
    if workers == 0:
        yield from map(make, indices)
        return
    # batch_size is None because each item is a whole batch. Without a generator of its own, the
    # iterator would draw from the global one. A fork copies no models or arrays to the workers.
    loader = DataLoader(
        _Made(make, workers),
        batch_size=None,
        sampler=indices,
        num_workers=workers,
        prefetch_factor=_AHEAD,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),
        multiprocessing_context="fork",
        worker_init_fn=lambda _: processes.help_starter(),
    )
    try:
        with processes.forking_helpers():
            batches = iter(loader)
    except OSError as error:  # such as a limit on files or processes, or no /dev/shm
        hint = f"a loading process cannot start ({error.strerror}); use data.workers=0"
        raise ConfigError("data.workers", workers, hint) from None
    for batch in batches:
        if isinstance(batch, ConfigError):
            raise batch
        # Collating and pinning turn a tuple into a list.
        yield cast(T, tuple(batch) if isinstance(batch, list) else batch)
