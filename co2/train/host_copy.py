"""HostCopy: a state as it is at one moment, in the host's memory, while training changes it."""

import copy
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from co2.comm.background import Arriving
from co2.comm.collectives import local


class HostCopy:
    """Copies one state after another, all into the same memory: the copy before is overwritten.

    The memory is as much as the tensors of a state, and on a machine with GPUs it is pinned.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[Hashable, ...], Tensor] = {}
        """Where a state's tensors are copied to, by their place in it."""
        self._waits: list[Callable[[], object]] = []

    def take(self, state: Any) -> Any:
        """Return a copy of nested dicts, lists and tuples of tensors and plain values.

        It is whole once `wait` has returned. A tensor that stands there twice, as tied weights do,
        is copied once; one that is `Arriving` is copied when it is there. `Any`: see above.
        """
        taken = _Taken(self._held)
        copied = taken.of(state, ())
        if taken.sources:
            torch._foreach_copy_(taken.targets, taken.sources, non_blocking=True)
        self._waits = [arriving.copy_to(target) for arriving, target in taken.arriving]
        if any(source.is_cuda for source in taken.sources):
            self._waits.append(torch.cuda.current_stream().record_event().synchronize)
        return copied

    def wait(self) -> None:
        """Wait until the copy is whole. Any thread may call it. Raises `RuntimeError` if what was
        arriving has not arrived well."""
        errors = []
        for wait in self._waits:  # all of them: the memory is used again afterwards
            try:
                wait()
            except RuntimeError as error:
                errors.append(error)
        if errors:
            raise errors[0]


class _Taken:
    """What has to be copied for one copy."""

    def __init__(self, held: dict[tuple[Hashable, ...], Tensor]) -> None:
        self.held = held
        self.sources: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.arriving: list[tuple[Arriving, Tensor]] = []
        self._same: dict[tuple[Hashable, ...], Tensor] = {}

    def of(self, value: Any, place: tuple[Hashable, ...]) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, place)
        if isinstance(value, Arriving):
            target = self._target(value.buffer, place)
            self.arriving.append((value, target))
            return target
        if isinstance(value, dict):
            copied = copy.copy(value)  # keeps what a module's state dict says of its versions
            for key, entry in value.items():
                copied[key] = self.of(entry, (*place, key))
            return copied
        if isinstance(value, list | tuple):
            return type(value)(self.of(entry, (*place, n)) for n, entry in enumerate(value))
        return value

    def _tensor(self, tensor: Tensor, place: tuple[Hashable, ...]) -> Tensor:
        source = local(tensor.detach())
        same = (source.data_ptr(), source.dtype, source.shape, source.stride())
        if same in self._same:
            return self._same[same]
        target = self._same[same] = self._target(tensor, place)
        self.sources.append(source)
        self.targets.append(local(target))
        return target

    def _target(self, tensor: Tensor, place: tuple[Hashable, ...]) -> Tensor:
        held, own = self.held.get(place), local(tensor.detach())
        if held is None or not _alike(local(held), own):
            if hasattr(tensor, "to_local"):  # a shard, which has to be known as one
                held = tensor.detach().to("cpu", copy=True)
            else:
                held = torch.empty_like(own, device="cpu", pin_memory=own.is_cuda)
            self.held[place] = held
        return held


def _alike(held: Tensor, tensor: Tensor) -> bool:
    return (held.shape, held.stride(), held.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
