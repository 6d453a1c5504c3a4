"""Copies of batches from the host's memory to a GPU, while that computes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


class Copies:
    """Copies from pinned memory to `device`, on a stream of their own. Any thread may begin one. To
    the CPU, where batches are already, nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def overlap(self) -> bool:
        """Whether the device computes while they go on."""
        return self._stream is not None

    def still_busy(self) -> Callable[[], bool]:
        """A question to ask later: whether the device has still not done what is queued now."""
        if self._stream is None:
            return lambda: False
        queued = torch.cuda.current_stream(self._device).record_event()
        return lambda: not queued.query()

    def begin(self, batch: Any) -> Callable[[], Any]:
        """Begin to copy a batch, which is a tensor, or a tuple or a dict of tensors; the host goes
        on. What this returns gives the copy to what the current stream does from then on."""
        if self._stream is None:
            return lambda: batch
        # Inside, this thread allocates pinned memory on the right device, too.
        with torch.cuda.stream(self._stream):
            copied = tree_map_only(Tensor, self._copy, batch)
            arrived = self._stream.record_event()

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
