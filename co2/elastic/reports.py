"""Reports: the thread that tells the store how this member's part of each collective has ended."""

import threading
from collections import deque
from collections.abc import Callable

Ticket = tuple[int, int]
"""Of a collective: its generation, and its number in it."""


class Reports:
    """The thread.

    Args:
        report: tells of one ticket, and whether its collective has ended well.
        tidy: done when there is nothing to report; false where there is nothing to tidy.
        failed: told of the error that has ended the thread: the connection to the store.
    """

    def __init__(
        self,
        report: Callable[[Ticket, bool], None],
        tidy: Callable[[], bool],
        failed: Callable[[RuntimeError], None],
    ) -> None:
        self._report, self._tidy, self._failed = report, tidy, failed
        self._ended: deque[tuple[Ticket, bool]] = deque()
        self._wake, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._thread.start()

    def add(self, ticket: Ticket, well: bool) -> None:
        """Report this. Any thread may call it."""
        self._ended.append((ticket, well))
        self.wake()

    def wake(self) -> None:
        """There is something to tidy. Any thread may call it."""
        self._wake.set()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._wake.wait()
                self._wake.clear()
                while self._ended or self._tidy():
                    if self._ended:
                        self._report(*self._ended.popleft())
        except RuntimeError as error:
            self._failed(error)
