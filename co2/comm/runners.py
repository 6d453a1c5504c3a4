"""Runners: each runs one asynchronous collective at a time and measures it.

On a CPU gloo's threads carry it, on a GPU a stream of its own. Waiting for it blocks nothing else.
Both have the same methods; see `HostRunner`.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from co2.comm.clocks import CudaStopwatch, Stopwatch
from co2.comm.deadlocks import DeadlockWatch
from co2.comm.waiting import Connections, finish, in_use, note_recorded
from co2.streams import SideStream

Buckets = tuple[Tensor, ...]
Group = dist.ProcessGroup | None
Ended = Callable[[bool], None] | None
"""Called by any thread at the end of a collective, with whether it ended well. None where members
cannot be lost."""


class HostRunner:
    """CPU: gloo's own threads carry a mean, and a future's callback stops the clock. One thread of
    ours carries a sequence; it does not start before the first."""

    def __init__(self) -> None:
        self.comm, self.exposed = Stopwatch(), Stopwatch()
        """Time of collectives, from launch to completion; and of the exposed waits."""
        self.watch: DeadlockWatch | None = None
        """Waits for gloo's collectives; None: they are waited for plainly."""
        self._sent_at = 0
        """The method's steps as it was sent."""
        self._works: list[dist.Work] = []
        self._group: Group = None
        self._sockets: Connections | None = None
        self._collected: torch.futures.Future[Any] | None = None
        self._clocked: torch.futures.Future[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="co2")
        self._carried: Future[None] | None = None

    def launch(self, buckets: Buckets, group: Group, ended: Ended) -> None:
        """Take the mean of every bucket, a part of one vector, over the group, in place."""
        clock = self.comm

        def stop_clock(futures: torch.futures.Future[Any]) -> None:
            # It must not hold the group: gloo's thread would join itself as it lets go of the last.
            clock.end()
            if ended is not None:
                ended(_well(futures))

        self._depart()
        self._group, self._sockets = group, in_use()
        works = []
        clock.begin()
        for bucket in buckets:
            work = dist.all_reduce(bucket, op=dist.ReduceOp.AVG, group=group, async_op=True)
            works.append(note_recorded(work, group))
        self._works = works
        futures = [work.get_future() for work in works]
        self._collected = torch.futures.collect_all(futures)
        self._clocked = self._collected.then(stop_clock)

    def copy(self, buffer: Tensor, target: Tensor) -> Callable[[], object]:
        """Copy the buffer when what was launched is over. See `Arriving.copy`."""
        collected, clocked = self._collected, self._clocked
        if collected is None or clocked is None:
            target.copy_(buffer)
            return lambda: None

        def copy(_: torch.futures.Future[None]) -> None:
            for future in collected.value():
                future.value()  # raises what has ended the collective
            target.copy_(buffer)

        self._clocked = copied = clocked.then(copy)
        works, group, sockets = self._works, self._group, self._sockets

        def wait() -> None:
            for work in works:
                finish(work, group, sockets)
            copied.wait()

        return wait

    def run(self, sequence: Callable[[], None]) -> None:
        """Run blocking collectives with arithmetic between them, in the background."""
        self.comm.begin()
        self._depart()

        def timed() -> None:
            sequence()
            self.comm.end()

        self._carried = self._thread.submit(timed)

    def _depart(self) -> None:
        self._sent_at = 0 if self.watch is None else self.watch.steps

    def wait(self, count: bool = True) -> None:
        """Wait for the pending work; on CUDA the current stream waits, and the host goes on.
        Raises the work's error.

        Args:
            count: whether this wait is exposed communication.
        """
        if count:
            self.exposed.begin()
        carried, self._carried = self._carried, None
        if carried is not None:
            if self.watch is None:
                carried.result()
            else:
                self.watch.result(carried, self._sent_at)
        for work in self._works:
            if self._sockets is None and self.watch is not None:
                self.watch.finish(work, self._sent_at)
            else:
                finish(work, self._group, self._sockets)
        self._forget()
        if count:
            self.exposed.end()

    def give_up(self) -> None:
        """Abort, and return when the buffer is free: the collective is over, or has failed because
        its connections are cut."""
        for work in self._works:
            with suppress(RuntimeError):
                finish(work, self._group, self._sockets)
            if not work.is_completed():  # gloo has forgotten it, and it never comes back to Python
                self._clocked = None
        self._forget()

    def _forget(self) -> None:
        if self._clocked is not None:
            # gloo's thread must be out of Python: one caught there at exit aborts the process. What
            # a copy of a failed mean raises is for whoever waits for the copy.
            with suppress(RuntimeError):
                self._clocked.wait()
        self._works, self._collected, self._clocked, self._group = [], None, None, None

    def close(self) -> None:
        """End the thread. Nothing is launched after it."""
        self._thread.shutdown()  # joins: like gloo's, ours must not meet the exit in a collective


class CudaRunner:
    """CUDA: a stream of its own carries what is launched. Where somebody has to know how it ended,
    a thread of ours waits for that; it does not start before the first."""

    def __init__(self) -> None:
        self.comm, self.exposed = CudaStopwatch(), CudaStopwatch()
        self.watch: DeadlockWatch | None = None  # the host waits for nothing
        self._side = SideStream()
        self._arrived: torch.cuda.Event | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="co2")
        self._well: Future[bool] | None = None
        """Whether the pending collective has ended well; None where members cannot be lost."""
        self._error: RuntimeError | None = None
        """Why nothing could be launched."""

    def launch(self, buckets: Buckets, group: Group, ended: Ended) -> None:
        def take_mean() -> None:
            mean = dist.ReduceOp.AVG
            works = [dist.all_reduce(one, op=mean, group=group, async_op=True) for one in buckets]
            for work in works:
                work.wait()  # orders this stream behind the collective; the host goes on

        if ended is None:
            self.run(take_mean)
            return
        try:
            self.run(take_mean)
        except RuntimeError as error:  # a member was lost already
            self._error = error
            ended(False)
            return
        assert self._arrived is not None
        self._well = self._thread.submit(_tell, self._arrived, in_use(), ended)

    def copy(self, buffer: Tensor, target: Tensor) -> Callable[[], object]:
        """See `HostRunner`. `target` lies in pinned memory."""
        under_way, well, error = self._arrived is not None, self._well, self._error
        if under_way:
            self._arrived = copied = self._side.copy([target], [buffer])
        else:
            target.copy_(buffer, non_blocking=True)
            copied = torch.cuda.current_stream().record_event()

        def wait() -> None:
            copied.synchronize()
            if error is not None or (well is not None and not well.result()):
                raise RuntimeError("a collective was aborted")

        return wait

    def run(self, sequence: Callable[[], None]) -> None:
        def timed() -> None:
            self.comm.begin()
            sequence()
            self.comm.end()

        self._side.after_compute()  # the snapshot comes first
        _, self._arrived = self._side.queue(timed)

    def wait(self, count: bool = True) -> None:
        if self._error is not None:
            raise self._error
        if self._arrived is None:
            return
        if count:
            self.exposed.begin()
        torch.cuda.current_stream().wait_event(self._arrived)
        self._arrived = self._well = None
        if count:
            self.exposed.end()

    def give_up(self) -> None:
        self._side.synchronize()  # what was aborted leaves it
        self._arrived = self._well = self._error = None

    def close(self) -> None:
        self._thread.shutdown()


Runner = HostRunner | CudaRunner


def _tell(
    arrived: torch.cuda.Event, sockets: Connections | None, ended: Callable[[bool], None]
) -> bool:
    """Wait until a GPU has reached an event, and report whether the collective ended well."""
    try:
        arrived.synchronize()
        well = sockets is None or not sockets.were_cut
    except RuntimeError:  # the GPU's, which the thread that trains will meet, too
        well = False
    ended(well)
    return well


def _well(futures: torch.futures.Future[Any]) -> bool:
    """Whether futures that have ended did so without an error."""
    try:
        return all(future.value() is not None for future in futures.value())
    except RuntimeError:
        return False
