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
from co2.comm.meeting import Meeting
from co2.comm.waiting import Connections, finish, in_use, note_recorded

Buckets = tuple[Tensor, ...]
Group = dist.ProcessGroup | None
Ended = Callable[[bool], None] | None
"""Told by any thread, when all is over, whether it ended well. None where nobody has to know,
because members cannot be lost."""


class HostRunner:
    """CPU: gloo's own threads carry a mean, and a future's callback stops the clock. One thread of
    ours carries a sequence; it does not start before the first."""

    def __init__(self) -> None:
        self.comm, self.exposed = Stopwatch(), Stopwatch()
        """Of what is carried, from launch to completion; and of the waits that count."""
        self.meeting: Meeting | None = None
        """Of the method that sends; None where there is none."""
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

        clock.begin()
        self._depart()
        self._group, self._sockets = group, in_use()
        self._works = [note_recorded(_all_reduce(bucket, group), group) for bucket in buckets]
        futures = [work.get_future() for work in self._works]
        self._collected = torch.futures.collect_all(futures)
        self._clocked = self._collected.then(stop_clock)

    def copy(self, buffer: Tensor, target: Tensor) -> Callable[[], object]:
        """Copy the buffer when what was launched is over. See `Arriving.copy_to`."""
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
        """Carry blocking collectives with arithmetic between them."""
        self.comm.begin()
        self._depart()

        def timed() -> None:
            sequence()
            self.comm.end()

        self._carried = self._thread.submit(timed)

    def _depart(self) -> None:
        self._sent_at = 0 if self.meeting is None else self.meeting.steps

    def wait(self, count: bool = True) -> None:
        """Wait until what was launched or run is over; on CUDA the current stream does, and the
        host goes on. Raises what has ended it.

        Args:
            count: whether this wait is exposed communication.
        """
        if count:
            self.exposed.begin()
        carried, self._carried = self._carried, None
        if carried is not None:
            self._join(carried)
        for work in self._works:
            if self._sockets is None and self.meeting is not None:
                self.meeting.finish(work, self._sent_at)
            else:
                finish(work, self._group, self._sockets)
        self._forget()
        if count:
            self.exposed.end()

    def _join(self, carried: Future[None]) -> None:
        if self.meeting is None:
            carried.result()
        else:
            self.meeting.result(carried, self._sent_at)

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
        """End what was started to carry. Nothing is launched after it."""
        self._thread.shutdown()  # joins: like gloo's, ours must not meet the exit in a collective


class CudaRunner:
    """CUDA: a stream of its own carries what is launched. Where somebody has to know how it ended,
    a thread of ours waits for that; it does not start before the first."""

    def __init__(self) -> None:
        self.comm, self.exposed = CudaStopwatch(), CudaStopwatch()
        self.meeting: Meeting | None = None  # the host waits for nothing
        self._stream = torch.cuda.Stream()
        self._arrived: torch.cuda.Event | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="co2")
        self._well: Future[bool] | None = None
        """Whether what is under way has ended well; None where nobody has to know."""
        self._error: RuntimeError | None = None
        """Why nothing could be launched."""

    def launch(self, buckets: Buckets, group: Group, ended: Ended) -> None:
        def mean() -> None:
            works = [_all_reduce(bucket, group) for bucket in buckets]
            for work in works:
                work.wait()  # orders this stream behind the collective; the host goes on

        if ended is None:
            self.run(mean)
            return
        try:
            self.run(mean)
        except RuntimeError as error:  # a member was lost already
            self._error = error
            ended(False)
            return
        assert self._arrived is not None
        self._well = self._thread.submit(_tell, self._arrived, in_use(), ended)

    def copy(self, buffer: Tensor, target: Tensor) -> Callable[[], object]:
        """See `HostRunner`. `target` lies in pinned memory."""
        under_way, well, error = self._arrived is not None, self._well, self._error
        with torch.cuda.stream(self._stream if under_way else torch.cuda.current_stream()):
            target.copy_(buffer, non_blocking=True)
            copied = torch.cuda.current_stream().record_event()
        if under_way:
            self._arrived = copied

        def wait() -> None:
            copied.synchronize()
            if error is not None or (well is not None and not well.result()):
                raise RuntimeError("a collective was aborted")

        return wait

    def run(self, sequence: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())  # the snapshot comes first
        with torch.cuda.stream(self._stream):
            self.comm.begin()
            sequence()
            self.comm.end()
            self._arrived = self._stream.record_event()

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
        self._stream.synchronize()  # what was aborted leaves it
        self._arrived = self._well = self._error = None

    def close(self) -> None:
        self._thread.shutdown()


Runner = HostRunner | CudaRunner


def _tell(
    arrived: torch.cuda.Event, sockets: Connections | None, ended: Callable[[bool], None]
) -> bool:
    """Wait until a GPU has come here, and tell whether all before it has ended well."""
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


def _all_reduce(bucket: Tensor, group: Group) -> dist.Work:
    return dist.all_reduce(bucket, op=dist.ReduceOp.AVG, group=group, async_op=True)
