"""A side stream without a GPU, as bad as it may be: copies happen when somebody waits, or at once.

It keeps a stream's promises and no more. Copies happen one after the other, at any time between
their being queued and their being waited for; and it reads of the parameters what the computation
had made of them when the stream last waited for it.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from co2.comm import flat
from co2.config import CommConfig, CommDevice

HOST = CommConfig(device=CommDevice.cpu)

Pace = Callable[[], int]
"""How many of the queued copies happen by themselves after one more was queued."""


def late() -> int:
    return 0


def at_once() -> int:
    return 1 << 30


def at_random(seed: int) -> Pace:
    source = random.Random(seed)
    return lambda: source.randrange(3)


class Event:
    def __init__(self, stream: "LateStream") -> None:
        self.stream, self.past = stream, False

    def synchronize(self) -> None:
        while not self.past:
            self.stream.go_on(1)


class LateStream:
    """Stands in for `co2.streams.SideStream`.

    Args:
        pace: of copies that nobody waits for.
        computes_late: the computation that waits for copies is itself still to come, until
            `go_on`; else it is at once, as everything on a CPU.
    """

    def __init__(self, pace: Pace, computes_late: bool = False) -> None:
        self.pace, self.computes_late = pace, computes_late
        self.queue: deque[tuple[Sequence[Tensor], Sequence[Tensor], Event]] = deque()
        self._host: set[int] = set()
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        vector = torch.full((numel,), torch.nan, dtype=dtype)
        self._host.add(_address(vector))
        return vector

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Event:
        event = Event(self)
        self.queue.append((list(targets), list(sources), event))
        self.go_on(self.pace())
        return event

    def after_compute(self) -> None:
        for real, seen in self._memory.values():
            seen.copy_(real)

    def before_compute(self) -> None:
        if not self.computes_late:
            self.go_on(len(self.queue))

    def go_on(self, count: int) -> None:
        for _ in range(min(count, len(self.queue))):
            targets, sources, event = self.queue.popleft()
            for target, source in zip(targets, sources, strict=True):
                if _address(source) in self._host:
                    self._seen(target).copy_(source)
                    target.copy_(source)
                else:
                    assert _address(target) in self._host, "it was made by empty()"
                    target.copy_(self._seen(source))
            event.past = True

    def _seen(self, live: Tensor) -> Tensor:
        """What the stream sees of a parameter."""
        if _address(live) not in self._memory:
            real = torch.empty(0, dtype=live.dtype).set_(live.untyped_storage())
            self._memory[_address(live)] = real, real.clone()
        _, seen = self._memory[_address(live)]
        return seen.as_strided(live.shape, live.stride(), live.storage_offset())


@contextmanager
def no_gpu_needed(pace: Pace, chunk: int = 10) -> Iterator[None]:
    """Inside: with comm.device=cpu a model on the CPU is treated as one on a GPU would be."""
    with (
        patch.object(flat, "side_stream", lambda device: LateStream(pace)),
        patch.dict(flat._CHUNK, cpu=chunk),
    ):
        yield


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
