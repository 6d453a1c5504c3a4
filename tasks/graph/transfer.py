"""Batches on their way to a GPU, which computes meanwhile."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Sent:
    """A batch whose copies may be under way."""

    batch: Tensors
    """Where the model is."""
    copied: torch.cuda.Event | None
    """After the last copy; None: there was nothing to copy."""

    def arrived(self) -> Tensors:
        """The batch, for what the current stream does from now on. The host does not wait."""
        if self.copied is not None:
            stream = torch.cuda.current_stream(self.copied.device)
            stream.wait_event(self.copied)
            for part in self.batch.values():
                part.record_stream(stream)  # its memory is the other stream's
        return self.batch


class Sender:
    """Copies batches from pinned memory, on a stream of its own. Any thread may send.

    Args:
        device: where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, batch: Tensors) -> Sent:
        """Start to copy what is not on the device yet."""
        if self._stream is None:
            return Sent(batch, None)
        # Inside, this thread allocates pinned memory on the right device, too.
        with torch.cuda.stream(self._stream):
            moved = {name: self._moved(part) for name, part in batch.items()}
            return Sent(moved, self._stream.record_event())

    def _moved(self, part: Tensor) -> Tensor:
        if part.is_cuda:
            return part
        return part.pin_memory().to(self._device, non_blocking=True)


def arriving(sent: Generator[Sent, None, None]) -> Generator[Tensors, None, None]:
    """Yield batches as they are needed."""
    with closing(sent):
        for one in sent:
            yield one.arrived()
