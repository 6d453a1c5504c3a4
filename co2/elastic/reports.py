"""Reports: the thread that talks to the store while the one that trains goes on."""

import itertools
import queue
import threading
from collections.abc import Callable

Ticket = tuple[int, int]
"""Of a collective: its generation, and its number in it."""


class Reports:
    """The thread. It does what is urgent first, and of that what came first.

    Args:
        failed: called by the thread with the error that has ended it.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed, self._numbers = failed, itertools.count()
        self.waiting = queue.PriorityQueue[tuple[int, int, Callable[[], object] | None]]()
        """What is not begun: how little urgent it is, its number, and what to do."""
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._thread.start()

    def add(self, act: Callable[[], object], urgent: bool = True) -> None:
        """Have something done. Any thread may call it."""
        self.waiting.put((0 if urgent else 1, next(self._numbers), act))

    def close(self) -> None:
        """End the thread, when all is done."""
        self.waiting.put((2, next(self._numbers), None))
        self._thread.join()

    def _run(self) -> None:
        try:
            while (act := self.waiting.get()[-1]) is not None:
                act()
        except Exception as error:
            self._failed(error)
