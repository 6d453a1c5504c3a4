"""HostCopy: tensors as they are at one moment, in the host's memory, while training goes on."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from co2.comm.background import Arriving


class HostCopy:
    """Copies one set of tensors after another, all into the same memory: the copy before is
    overwritten.

    The memory is as much as the tensors, and pinned for those of a GPU. They are copied on a stream
    of their own, beside a forward and a backward pass, until `hold`.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._waits: list[Callable[[], object]] = []
        self._stream: torch.cuda.Stream | None = None
        self._sources: list[Tensor] = []
        """What a GPU still copies: nobody else may get its memory."""
        self._copied: torch.cuda.Event | None = None

    def take(self, tensors: Mapping[str, Tensor | Arriving]) -> dict[str, Tensor]:
        """Return copies of tensors by name. They are whole once `wait` has returned,
        and are of now if nobody changes a tensor of a GPU before `hold`; what is `Arriving` is
        copied when it is there."""
        arriving = {name: one for name, one in tensors.items() if isinstance(one, Arriving)}
        there = {name: one for name, one in tensors.items() if isinstance(one, Tensor)}
        taken = {name: self._target(name, one) for name, one in there.items()}
        self._sources = list(there.values())
        with self._aside():
            if taken:
                torch._foreach_copy_(list(taken.values()), self._sources, non_blocking=True)
            if self._stream is not None:
                self._copied = self._stream.record_event()
        late = {name: self._target(name, one.buffer) for name, one in arriving.items()}
        self._waits = [one.copy_to(late[name]) for name, one in arriving.items()]
        return taken | late

    def hold(self) -> None:
        """Call it before anything changes a tensor. A GPU then finishes copying first; the host
        goes on."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None

    def wait(self) -> None:
        """Wait until the copy is whole. Any thread may call it. Raises `RuntimeError` if what was
        arriving has not arrived well."""
        if self._stream is not None:
            self._stream.synchronize()
        self._sources = []
        errors = []
        for wait in self._waits:  # all of them: the memory is used again afterwards
            try:
                wait()
            except RuntimeError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _aside(self) -> AbstractContextManager[object]:
        """For a GPU its stream of copies, behind what the current stream does."""
        if self._stream is None and any(source.is_cuda for source in self._sources):
            self._stream = torch.cuda.Stream()
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _target(self, name: str, tensor: Tensor) -> Tensor:
        held = self._held.get(name)
        kind = tensor.shape, tensor.stride(), tensor.dtype
        if held is None or (held.shape, held.stride(), held.dtype) != kind:
            held = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._held[name] = held
        return held
