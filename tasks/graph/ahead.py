"""What a thread makes ahead of its use."""

import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

T = TypeVar("T")
_LOOK_S = 0.1
"""Seconds after which a thread that waits looks whether anybody still wants what it makes."""


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def ahead(made: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yield what an iterator makes, which a thread of its own goes through.

    Args:
        made: the iterator. What it raises is raised here, in its turn. It is closed when the caller
            closes or drops what it gets from here.
        depth: how many the thread makes ahead; 0: none, and there is no thread.
    """
    if depth == 0:
        yield from made
        return
    ready: queue.Queue[T | _End] = queue.Queue(depth)
    unwanted = threading.Event()

    def put(one: T | _End) -> bool:
        while not unwanted.is_set():
            try:
                ready.put(one, timeout=_LOOK_S)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        error: BaseException | None = None
        try:
            for one in made:
                if not put(one):
                    break
        except BaseException as raised:  # it is raised where the caller waits
            error = raised
        finally:
            close = getattr(made, "close", None)
            if close is not None:
                close()
        put(_End(error))

    thread = threading.Thread(target=work, name="ahead", daemon=True)
    thread.start()
    try:
        while True:
            one = ready.get()
            if isinstance(one, _End):
                if one.error is not None:
                    raise one.error
                return
            yield one
    finally:
        unwanted.set()
        thread.join()
