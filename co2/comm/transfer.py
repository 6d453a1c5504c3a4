"""Between live parameters and flat vectors: in one memory, or from a GPU to the host and back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

Live = tuple[Tensor, ...]
"""What one chunk of the flat vector stands for: views of parameters, in order, without gaps."""


class Direct:
    """Parameters and vectors in one memory: plain copies, which happen as they are asked for."""

    def __init__(self, chunks: Sequence[Live], dtype: torch.dtype, device: torch.device) -> None:
        self._chunks, self._dtype, self._device = chunks, dtype, device
        self._scratch = self.empty(_longest(chunks))

    def empty(self, numel: int) -> Tensor:
        """Memory for a vector."""
        return torch.empty(numel, dtype=self._dtype, device=self._device)

    def scratch_tensors(self) -> list[Tensor]:
        return [self._scratch]

    @contextmanager
    def round(self) -> Iterator[None]:
        """Around everything that a method does with live parameters when a round ends."""
        yield

    def local(self, index: int) -> Tensor:
        """The live parameters of a chunk, in scratch that the next call overwrites."""
        live = self._chunks[index]
        values = self._scratch[: _numel(live)]
        torch._foreach_copy_(_views(values, live), list(live))
        return values

    def write(self, index: int, values: Tensor) -> None:
        """Live parameters of a chunk ← values."""
        live = self._chunks[index]
        torch._foreach_copy_(list(live), _views(values, live))


class SideStream:
    """A CUDA stream that copies between a GPU and pinned memory of the host."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that can be copied to and from while the host goes on."""
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> torch.cuda.Event:
        """Queue copies behind all those before; the event is their end."""
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def after_compute(self) -> None:
        """What is queued from here on comes after the computation queued so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def before_compute(self) -> None:
        """The computation queued from here on comes after the copies queued so far."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@dataclass(frozen=True)
class _Fetched:
    index: int
    values: Tensor
    arrived: torch.cuda.Event


class Staged:
    """Parameters on a GPU, vectors in the host's memory; the next chunk comes while the host works.

    Why nothing is read too early or overwritten too soon: one stream makes all copies, in the
    order in which they are queued here.

    - Parameters: at a round's end the stream waits for the computation before it reads the first,
      and the next computation waits for the stream, which has written the last.
    - Reading a staging buffer: `local` waits for the copy into it.
    - Copying into a staging buffer: the host is done with it, for there are two, and what `local`
      returned is the caller's until the next call only. What was to be copied out of it was
      queued before.
    - The host's writing into a staging buffer: that is what `local` returned, so the copy into it
      is over, and with it all that were queued before.
    - The host's writing into a vector that it has handed to `write`: not before the next round,
      which begins by waiting for the last write.
    """

    def __init__(self, chunks: Sequence[Live], dtype: torch.dtype, side: SideStream) -> None:
        self._chunks, self._dtype, self._side = chunks, dtype, side
        self._buffers = [self.empty(_longest(chunks)) for _ in range(2)]
        self._turn = 0
        self._ahead: _Fetched | None = None
        self._written: torch.cuda.Event | None = None
        self._open = False

    def empty(self, numel: int) -> Tensor:
        """Memory for a vector."""
        return self._side.empty(numel, self._dtype)

    def scratch_tensors(self) -> list[Tensor]:
        return list(self._buffers)

    @contextmanager
    def round(self) -> Iterator[None]:
        """See `Direct`."""
        if self._written is not None:
            self._written.synchronize()
        self._side.after_compute()
        self._ahead, self._open = None, True
        yield
        self._open = False
        self._side.before_compute()

    def local(self, index: int) -> Tensor:
        """See `Direct`."""
        assert self._open, "only inside round()"
        if self._ahead is None or self._ahead.index != index:
            self._ahead = self._fetch(index)
        fetched, self._ahead = self._ahead, None
        if index + 1 < len(self._chunks):
            self._ahead = self._fetch(index + 1)
        fetched.arrived.synchronize()
        return fetched.values

    def write(self, index: int, values: Tensor) -> None:
        """See `Direct`. The values are to stay as they are until the round is over."""
        assert self._open, "only inside round()"
        if self._ahead is not None and self._ahead.index == index:
            self._ahead = None  # it was fetched before it was written
        live = self._chunks[index]
        self._written = self._side.copy(live, _views(values, live))

    def _fetch(self, index: int) -> _Fetched:
        live = self._chunks[index]
        self._turn = 1 - self._turn
        values = self._buffers[self._turn][: _numel(live)]
        return _Fetched(index, values, self._side.copy(_views(values, live), live))


def side_stream(device: torch.device) -> SideStream | None:
    """A stream for copies to the host; None where the parameters are in its memory already."""
    return SideStream(device) if device.type == "cuda" else None


def _longest(chunks: Sequence[Live]) -> int:
    return max(_numel(live) for live in chunks)


def _numel(live: Live) -> int:
    return sum(part.numel() for part in live)


def _views(values: Tensor, live: Live) -> list[Tensor]:
    parts = values.split([part.numel() for part in live])
    return [part.view(like.shape) for part, like in zip(parts, live, strict=True)]
