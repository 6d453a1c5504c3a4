"""Waiting for collectives whose connections somebody may cut, because a worker is lost.

Where workers may be lost, co2/elastic/sockets.py cuts the connections of all collectives, which
then end with an error; about 5 % of them never return (it says why). So wait with `finish` and
`until_cut` only. Where nobody cuts anything, these wait plainly.
"""

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
_LOOK = timedelta(milliseconds=100)
_FORGOTTEN: list[object] = []


class Connections(Protocol):
    """What carries collectives, and may be cut."""

    @property
    def were_cut(self) -> bool: ...

    def closed(self) -> bool:
        """Whether all that were cut are closed, a moment ago or longer. Ask it again and again."""

    def give_up(self) -> bool:
        """Whether pending work counts as leaked: the grace period after the cut is over."""


_current: Connections | None = None
_workers: dist.ProcessGroup | None = None


def use(connections: Connections | None, workers: dist.ProcessGroup | None = None) -> None:
    """These may be cut, and carry all that begins from now on; None: none may be cut.

    Args:
        workers: the group of all workers that they connect.
    """
    global _current, _workers
    _current, _workers = connections, workers


def in_use() -> Connections | None:
    """What `use` was told last."""
    return _current


def everyone() -> dist.ProcessGroup | None:
    """The group of all workers: PyTorch's default one, unless `use` was told another. None for a
    process without any."""
    if _current is not None:
        return _workers
    return dist.group.WORLD if dist.is_available() else None


def forgotten() -> bool:
    """Whether work was leaked, for which an interpreter that ends normally would wait."""
    return bool(_FORGOTTEN)


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
            _FORGOTTEN.append((work, group))
            raise RuntimeError("a collective was cut")


def until_cut(act: Callable[[], T]) -> T:
    """Do something that blocks until others have done it too, in a thread where it may be cut.

    Raises:
        RuntimeError: it never returned after the cut.
    """
    connections = _current
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
    """Do with other replicas what all workers of this one do at the same place. Where it may be
    cut, it fails for all of them if it fails for one: the others would wait for that one in what
    they do next within the replica.

    Raises:
        RuntimeError: it has failed here, or on another worker of this replica.
    """
    if _current is None or dist.get_world_size() == 1:
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
    """Whether something has gone well on all workers of the default group. Collective."""
    failures = torch.tensor(not well, dtype=torch.int64)
    dist.all_reduce(failures)
    return failures.item() == 0


def is_loss(error: Exception) -> bool:
    """Whether an error says that another worker of a group has gone."""
    text = r"(?i)(closed|reset) by peer|broken pipe|connection refused|was cut"
    return isinstance(error, RuntimeError) and re.search(text, str(error)) is not None


def thread_ended(thread: threading.Thread, connections: Connections) -> bool:
    """Wait until a thread that uses connections has ended. False: it never will, for it was
    forgotten when they were cut."""
    while thread.is_alive():
        thread.join(_LOOK.total_seconds())
        if thread.is_alive() and connections.give_up():
            _FORGOTTEN.append(thread)
            return False
    return True
