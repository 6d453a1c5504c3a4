"""Waiting for collectives whose connections somebody may cut, because a worker is lost.

Where workers may be lost, co2/elastic/sockets.py cuts the connections of all collectives, which
then end with an error; about 5 % of them never return (it says why). So wait with `finish` and
`until_cut` only. Where nobody cuts anything, these wait plainly.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Protocol, TypeVar

import torch.distributed as dist

T = TypeVar("T")
_LOOK = timedelta(milliseconds=100)
_FORGOTTEN: list[object] = []


class Connections(Protocol):
    """What carries collectives, and may be cut."""

    @property
    def were_cut(self) -> bool:
        """Whether the connections were cut."""
        ...

    def closed(self) -> bool:
        """Whether all that were cut are closed, a moment ago or longer. Ask it again and again."""
        ...

    def give_up(self) -> bool:
        """Whether pending work counts as leaked: the grace period after the cut is over."""
        ...


_current: Connections | None = None


def use(connections: Connections | None) -> None:
    """These may be cut, and carry all that begins from now on; None: none may be cut."""
    global _current
    _current = connections


def in_use() -> Connections | None:
    """What `use` was told last."""
    return _current


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


def thread_ended(thread: threading.Thread, connections: Connections) -> bool:
    """Wait until a thread that uses connections has ended. False: it never will, for it was
    forgotten when they were cut."""
    while thread.is_alive():
        thread.join(_LOOK.total_seconds())
        if thread.is_alive() and connections.give_up():
            _FORGOTTEN.append(thread)
            return False
    return True
