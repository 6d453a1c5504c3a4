"""Work on a GPU beside the computation: on a stream of its own, ordered by events."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

T = TypeVar("T")


class SideStream:
    """A CUDA stream of `device`, or of the current one; the stream that is current computes."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._stream = torch.cuda.Stream(device)

    def queue(self, work: Callable[[], T]) -> tuple[T, torch.cuda.Event]:
        """Queue what `work` launches behind all earlier work. Returns its result, and an event that
        marks the end."""
        with torch.cuda.stream(self._stream):
            return work(), self._stream.record_event()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return pinned memory, which can be copied to and from while the host goes on."""
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> torch.cuda.Event:
        """Queue copies, of at least one tensor, behind all earlier work, and return an event that
        marks their end."""
        copying = (list(targets), list(sources))
        return self.queue(lambda: torch._foreach_copy_(*copying, non_blocking=True))[1]

    def after_compute(self) -> None:
        """Make work queued from here on wait for the computation queued so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def before_compute(self) -> None:
        """Make computation queued from here on wait for the work queued so far."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """Wait for all work queued so far."""
        self._stream.synchronize()


def side_stream(device: torch.device) -> SideStream | None:
    """Return a stream for work beside that of a GPU; None for the CPU."""
    return SideStream(device) if device.type == "cuda" else None


class BatchCopies:
    """Copies of batches from the host's memory to `device`, while that computes. Any thread may
    begin one. To the CPU, where batches are already, nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, side_stream(device)

    @property
    def overlap(self) -> bool:
        """Whether the device computes while they go on."""
        return self._side is not None

    def still_busy(self) -> Callable[[], bool]:
        """A question to ask later: whether the device has still not done what is queued now."""
        if self._side is None:
            return lambda: False
        queued = torch.cuda.current_stream(self._device).record_event()
        return lambda: not queued.query()

    def begin(self, batch: Any) -> Callable[[], Any]:
        """Begin to copy a batch, which is a tensor, or a tuple or a dict of tensors; the host goes
        on. What this returns gives the copy to what the current stream does from then on."""
        if self._side is None:
            return lambda: batch
        # Inside, this thread allocates pinned memory on the right device, too.
        copied, arrived = self._side.queue(lambda: tree_map_only(Tensor, self._copy, batch))

        def take() -> Any:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(arrived)
            for part in tree_leaves(copied):
                if isinstance(part, Tensor):  # whose memory the other stream gets no sooner
                    part.record_stream(stream)
            return copied

        return take

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.is_cuda:  # a task's own table, for example
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
