"""Copies between live parameters and flat vectors: within one memory, or between GPU and host."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from co2.comm.cuts import Part
from co2.streams import SideStream

Live = tuple[Tensor, ...]
"""The parameters that one chunk of the flat vector stands for: views, in order, without gaps."""


@dataclass(frozen=True, kw_only=True)
class Chunk(Part):
    """Consecutive elements of the flat vector, all of one parameter group, and with one share."""

    span: slice
    index: int
    group: int
    transfer: "Direct | Staged"
    """Copies to and from the live tensors."""

    @property
    def numel(self) -> int:
        return self.span.stop - self.span.start

    def read(self) -> Tensor:
        """Return the live values of the chunk, in scratch that the next call overwrites."""
        return self.transfer.read(self.index)

    def write(self, values: Tensor) -> None:
        """Set the live parameters to `values`, which is this chunk of some vector."""
        self.transfer.write(self.index, values)


class Direct:
    """Parameters and vectors are in one memory: plain copies, each made at once."""

    def __init__(self, chunks: Sequence[Live], dtype: torch.dtype, device: torch.device) -> None:
        self._chunks, self._dtype, self._device = chunks, dtype, device
        self._scratch = self.empty(_longest(chunks))
        starts = [self._scratch[: _numel(live)] for live in chunks]
        self._reads = [
            (start, views(start, live)) for start, live in zip(starts, chunks, strict=True)
        ]

    def empty(self, numel: int) -> Tensor:
        """Return uninitialized memory for a vector."""
        return torch.empty(numel, dtype=self._dtype, device=self._device)

    def scratch_tensors(self) -> list[Tensor]:
        """Return what is held beside the vectors: the longest chunk."""
        return [self._scratch]

    def round(self) -> AbstractContextManager[None]:
        """Context for synchronized access to the live parameters at a round's end."""
        return nullcontext()

    def read(self, index: int) -> Tensor:
        """Return the live parameters of a chunk, in scratch that the next call overwrites."""
        values, parts = self._reads[index]
        torch._foreach_copy_(parts, list(self._chunks[index]))
        return values

    def write(self, index: int, values: Tensor) -> None:
        """Set the live parameters of a chunk to `values`."""
        live = self._chunks[index]
        torch._foreach_copy_(list(live), views(values, live))


class Staged:
    """Parameters are on a GPU, vectors in the host's memory. While the host works on one chunk, the
    next is on its way.

    Nothing is read too early or overwritten too soon, because one stream makes all copies, in the
    order in which they are queued here:

    - Parameters: at a round's end the stream waits for the computation before it reads the first,
      and the next computation waits for the stream, which has written the last.
    - Reading a staging buffer: `read` waits for the copy into it.
    - Copying into a staging buffer: the host has finished with it, because there are two, and the
      caller may use what `read` returned until the next call only. Copies out of it were queued
      before.
    - The host writes into a staging buffer: `read` has returned it, so the copy into it is over,
      and so are all copies queued before.
    - The host writes into a vector that it has passed to `write`: not before the next round, which
      begins by waiting for the last write.
    """

    def __init__(self, chunks: Sequence[Live], dtype: torch.dtype, side: SideStream) -> None:
        self._chunks, self._dtype, self._side = chunks, dtype, side
        self._buffers = [self.empty(_longest(chunks)) for _ in range(2)]
        self._turn = 0
        self._ahead: tuple[int, Tensor, torch.cuda.Event] | None = None
        """The chunk that is on its way: index, values, and when they have arrived."""
        self._written: torch.cuda.Event | None = None
        self._open = False

    def empty(self, numel: int) -> Tensor:
        """Return uninitialized memory for a vector."""
        return self._side.empty(numel, self._dtype)

    def scratch_tensors(self) -> list[Tensor]:
        """See `Direct`. These are two buffers, each as long as the longest chunk."""
        return list(self._buffers)

    @contextmanager
    def round(self) -> Iterator[None]:
        """See `Direct`."""
        if self._written is not None:
            self._written.synchronize()
        self._side.after_compute()
        self._ahead, self._open = None, True
        try:
            yield
        finally:
            self._open = False
            self._side.before_compute()

    def read(self, index: int) -> Tensor:
        """See `Direct`."""
        assert self._open, "only inside round()"
        if self._ahead is None or self._ahead[0] != index:
            self._ahead = self._fetch(index)
        _, values, arrived = self._ahead
        self._ahead = self._fetch(index + 1) if index + 1 < len(self._chunks) else None
        arrived.synchronize()
        return values

    def write(self, index: int, values: Tensor) -> None:
        """See `Direct`. The caller must not change the values until the round is over."""
        assert self._open, "only inside round()"
        if self._ahead is not None and self._ahead[0] == index:
            self._ahead = None  # it was fetched before this write, so it is out of date
        live = self._chunks[index]
        self._written = self._side.copy(live, views(values, live))

    def _fetch(self, index: int) -> tuple[int, Tensor, torch.cuda.Event]:
        live = self._chunks[index]
        self._turn = 1 - self._turn
        values = self._buffers[self._turn][: _numel(live)]
        return index, values, self._side.copy(views(values, live), live)


def _longest(chunks: Sequence[Live]) -> int:
    return max(_numel(live) for live in chunks)


def _numel(live: Live) -> int:
    return sum(part.numel() for part in live)


def views(values: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive parts of a vector as views, with the shapes of tensors `like`."""
    parts = values.split([one.numel() for one in like])
    return [part.view(one.shape) for part, one in zip(parts, like, strict=True)]
