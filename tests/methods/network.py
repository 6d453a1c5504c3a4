"""Stand-ins for what carries: a network that is watched, slow or dead, and a GPU's side stream."""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from co2.comm import flat
from co2.comm.runners import HostRunner
from co2.config import CommConfig, CommDevice
from co2.methods.allreduce import AllReduce
from co2.methods.base import Method

WATCHED = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "barrier",
    "new_group",
)


class Recorder(TorchDispatchMode):
    """Inside `with`: logs every collective as (step, name, elements, dtype, async).

    Those that are called through `torch.distributed` have that function's name. Those that C++ code
    launches on this thread, as DistributedDataParallel does, have the operator's: `allreduce_`; all
    of them are asynchronous. The user counts the steps: `recorder.step += 1`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.log: list[tuple[int, str, int, str, bool]] = []
        self._patches: list[Any] = []
        self._calling = False
        """Whether a call through `torch.distributed` is under way, which is logged already."""

    def __enter__(self) -> "Recorder":
        for name in WATCHED:
            logged = self._logged(name, getattr(dist, name))
            self._patches.append(patch.object(dist, name, logged))
            self._patches[-1].start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for patched in reversed(self._patches):
            patched.stop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d" and not self._calling:
            name = func.overloadpacket.__name__
            for tensor in tree_leaves(args[0]):
                self.log.append((self.step, name, tensor.numel(), str(tensor.dtype), True))
        return func(*args, **(kwargs or {}))

    def _logged(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = next((a for a in args if isinstance(a, torch.Tensor)), torch.empty(0))
            background = bool(kwargs.get("async_op", False))
            self.log.append((self.step, name, tensor.numel(), str(tensor.dtype), background))
            self._calling = True
            try:
                return original(*args, **kwargs)
            finally:
                self._calling = False

        return call


class HeldWork:
    """What is under way, had the network not moved before `release`."""

    def __init__(self, launch: Callable[[], Any], delay: int) -> None:
        self.steps_seen, self.delay = -1, delay
        self.forced = False
        """Whether it was waited for before its time."""
        self._launch, self._future = launch, torch.futures.Future()

    def release(self) -> None:
        if not self.is_completed():
            self._launch()
            self._future.set_result([])

    def wait(self, timeout: Any = None) -> bool:
        self.forced = self.forced or not self.is_completed()
        self.release()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> torch.futures.Future:
        return self._future


class SlowNetwork:
    """Inside `with`: an asynchronous all_reduce, or a sequence of collectives in the background,
    reads and writes its tensors `delay(n)` local steps after its launch, all at once; or when it is
    waited for, if that comes first.

    n counts the launches. The user calls `tick()` after each local step. Blocking collectives pass.
    """

    def __init__(self, delay: Callable[[int], int]) -> None:
        self.delay = delay
        self.works: list[HeldWork] = []

    def __enter__(self) -> "SlowNetwork":
        original = dist.all_reduce

        def held(launch: Callable[[], Any]) -> HeldWork:
            work = HeldWork(launch, self.delay(len(self.works)))
            self.works.append(work)
            if work.delay == 0:
                work.release()
            return work

        def all_reduce(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.pop("async_op", False):
                return original(*args, **kwargs)
            return held(lambda: original(*args, **kwargs))

        def run(runner: Any, sequence: Callable[[], None]) -> None:
            runner._works = [held(sequence)]

        self._patches = ExitStack()
        self._patches.enter_context(patch.object(dist, "all_reduce", all_reduce))
        self._patches.enter_context(patch.object(HostRunner, "run", run))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def tick(self) -> None:
        """A local step is over, the one that launched included."""
        for work in self.works:
            work.steps_seen += 1
            if work.steps_seen == work.delay:
                work.release()


class FinishedWork:
    """What `async_op=True` returns for a collective that is over."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result([])
        return future


def drop(*args: Any, async_op: bool = False, **kwargs: Any) -> FinishedWork | None:
    """Stands in for a collective: it returns at once and exchanges nothing."""
    return FinishedWork() if async_op else None


EXCHANGING = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
)
"""The collectives by which methods synchronize after `prepare`."""


@contextmanager
def nothing_exchanged(model: nn.Module) -> Iterator[None]:
    """Inside: training goes on as if every collective had worked, but replicas exchange nothing."""
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(dist, **dict.fromkeys(EXCHANGING, drop)))
        stack.enter_context(patch.object(dist, "batch_isend_irecv", lambda calls: []))
        if isinstance(model, DistributedDataParallel):
            stack.enter_context(model.no_sync())  # its collectives do not go through `dist`
            stack.enter_context(patch.object(AllReduce, "update", Method.inner_step))
        yield


# A side stream without a GPU, as bad as it may be: copies happen when somebody waits, or at once.
#
# It keeps a stream's promises and no more. Copies happen one after the other, at any time between
# their being queued and their being waited for; and it reads of the parameters what the computation
# had made of them when the stream last waited for it.

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
