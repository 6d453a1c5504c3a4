"""Waiting for collectives whose connections somebody may cut, because a worker is lost.

Where workers may be lost, co2/elastic/sockets.py cuts the connections of all collectives, which
then end with an error; about 5 % of them never return (it says why). So wait with `finish` and
`until_cut` only. Where nobody cuts anything, these wait plainly.

gloo's thread writes the end of a collective that is launched while torch.profiler records into the
profiler's memory, which is freed when the profiler stops. One that ends later writes into memory
that has become somebody else's, and the process dies in a place that has nothing to do with it. So
what may outlive the step in which it is launched is given to `note_recorded`, and the profiler
stops after `end_recording`. A collective of a thread of ours is not recorded, and NCCL's ends for
the profiler at its launch.
"""

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
_LOOK = timedelta(milliseconds=100)


class Connections(Protocol):
    """Connections that carry collectives, and may be cut."""

    @property
    def were_cut(self) -> bool: ...

    def closed(self) -> bool:
        """Whether all that were cut have been closed for a moment. To be polled."""

    def give_up(self) -> bool:
        """Whether pending work counts as leaked: the grace period after the cut is over."""


@dataclass
class _Process:
    """What all collectives of this process have in common. It is of the whole process, as PyTorch's
    default process group is, which it stands beside."""

    connections: Connections | None = None
    """See `use`."""
    workers: dist.ProcessGroup | None = None
    recorded: list[tuple[dist.Work, object, Connections | None]] | None = None
    """Collectives that were launched while torch.profiler records; None while it does not."""
    leaked: list[object] = field(default_factory=list)
    """What must never be destroyed, because that would wait for ever, or be written to."""


_PROCESS = _Process()


def use(connections: Connections | None, workers: dist.ProcessGroup | None = None) -> None:
    """Name the connections of all collectives from now on, which may be cut. None: none may be.

    Args:
        workers: the group of all workers that they connect.
    """
    _PROCESS.connections, _PROCESS.workers = connections, workers


def in_use() -> Connections | None:
    """What `use` was told last."""
    return _PROCESS.connections


def everyone() -> dist.ProcessGroup | None:
    """The group of all workers: PyTorch's default one, unless `use` was told another. None for a
    process without any."""
    if _PROCESS.connections is not None:
        return _PROCESS.workers
    return dist.group.WORLD if dist.is_available() else None


def leak(thing: object) -> None:
    """Never destroy this."""
    _PROCESS.leaked.append(thing)


def has_leaked() -> bool:
    """Whether an interpreter that ends normally would destroy what was leaked."""
    return bool(_PROCESS.leaked)


def finish(work: dist.Work, group: object, connections: Connections | None) -> None:
    """Wait for a collective of gloo's.

    Args:
        work: of the group's, and no `send` or `recv`.
        connections: those that carry it.
    Raises:
        RuntimeError: it has failed, or never returned after the cut.
    """
    if connections is None:
        work.wait()
        return
    while True:
        try:
            work.wait(_LOOK)
            return
        except RuntimeError:  # it has failed, or had not ended yet
            if work.is_completed():
                work.wait()
                return
        if connections.closed() or connections.give_up():
            leak((work, group))
            raise RuntimeError("a collective was cut")


def until_cut(act: Callable[[], T]) -> T:
    """Run something that blocks until other workers run it too. Where connections may be cut, a
    thread runs it.

    Raises:
        RuntimeError: it never returned after the cut.
    """
    connections = _PROCESS.connections
    if connections is None:
        return act()
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="until cut", daemon=True)
    thread.start()
    if not thread_ended(thread, connections):
        raise RuntimeError("what all do together was cut")
    return done.result()


def as_one(act: Callable[[], T]) -> T:
    """Run a collective that all workers of this replica enter together. In elastic runs it fails on
    all of them if it fails on one: the others would wait for that one in their next collective.

    Raises:
        RuntimeError: it has failed here, or on another worker of this replica.
    """
    if _PROCESS.connections is None or dist.get_world_size() == 1:
        return act()
    error: RuntimeError | None = None
    try:
        done = act()
    except RuntimeError as failed:
        error = failed
    if well_on_all(error is None):
        return done
    raise error or RuntimeError("a collective of another worker of the replica was cut")


def well_on_all(well: bool) -> bool:
    """Whether all workers of the default group succeeded. Collective."""
    failures = torch.tensor(not well, dtype=torch.int64)
    dist.all_reduce(failures)
    return failures.item() == 0


def is_loss(error: Exception) -> bool:
    """Whether an error says that another worker of a group has gone."""
    text = r"(?i)(closed|reset) by peer|broken pipe|connection refused|connect timeout|was cut"
    return isinstance(error, RuntimeError) and re.search(text, str(error)) is not None


def thread_ended(thread: threading.Thread, connections: Connections) -> bool:
    """Wait until a thread that uses connections has ended. False: it never will, for it was
    leaked when they were cut."""
    while thread.is_alive():
        thread.join(_LOOK.total_seconds())
        if thread.is_alive() and connections.give_up():
            leak(thread)
            return False
    return True


def begin_recording() -> None:
    """torch.profiler is about to record."""
    _PROCESS.recorded = []


def note_recorded(work: dist.Work, group: object) -> dist.Work:
    """Return the collective, which is gloo's, of the group. `end_recording` waits for it if
    torch.profiler records."""
    if _PROCESS.recorded is not None:
        _PROCESS.recorded.append((work, group, in_use()))
    return work


def end_recording(wait: bool = True) -> bool:
    """Wait for all collectives that were noted since `begin_recording`. Nothing is noted any more.

    Args:
        wait: False where one of them may wait for a worker that is gone.
    Returns:
        Whether torch.profiler may stop. It must not where one was not waited for, or never ends,
        because it was leaked when its connections were cut.
    """
    noted, _PROCESS.recorded = _PROCESS.recorded or [], None
    if not wait:
        return not noted
    for work, group, connections in noted:
        with suppress(RuntimeError):  # its owner waits for it too, and meets the error there
            finish(work, group, connections)
    return all(work.is_completed() for work, _, _ in noted)
