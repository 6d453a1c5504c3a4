"""Watch: the thread that gives a member's signs of life and watches those of the others."""

import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from co2.elastic.members import Members

STOP = "stop"
"""By which a member asks all to stop."""
TICK_S = 0.1
_START_S = 600.0
"""A process that has given no sign of life yet may still be importing."""
Ticket = tuple[int, int]
"""Of a collective: its generation, and its number in it."""


class StoreLost(Exception):
    """The store cannot be reached, so that nothing can be agreed upon."""


def key(*parts: object) -> str:
    """A name in the store."""
    return "/".join(map(str, parts))


class Watch:
    """The thread, which also tells the store what has ended.

    Args:
        members: whose member this process is.
        store: a connection of the thread's own, because one answers one question at a time.
    """

    def __init__(self, members: "Members", store: dist.Store) -> None:
        self.members, self.store = members, store
        self.stop_asked = False
        self._error: Exception | None = None
        self._ended: deque[tuple[Ticket, bool]] = deque()
        self._signs: dict[int, tuple[str, float]] = {}
        """By member: its last sign of life, and when it was new; "" while there was none."""
        self._gone: set[int] = set()
        self._departures = self._beats = 0
        self._looked = time.monotonic()
        self._wake, self._closed = threading.Event(), False
        self._beat()
        self._thread = threading.Thread(target=self._run, name="members", daemon=True)
        self._thread.start()

    def candidates(self, ids: Iterable[int]) -> None:
        """Watch these, and nobody else."""
        now = time.monotonic()
        self._signs = {one: self._signs.get(one, ("", now)) for one in ids}

    def ended(self, ticket: Ticket, well: bool) -> None:
        """See `Members.ended`."""
        self._ended.append((ticket, well))
        self._wake.set()

    def silence(self, one: int) -> str:
        """Why a candidate counts as lost; empty while it does not."""
        if one in self._gone:
            return "gone"
        sign, since = self._signs[one]
        silent = time.monotonic() - since
        limit = self.members.silent_s if sign else _START_S
        return f"silent for {silent:.0f} s" if silent > limit else ""

    def check(self) -> None:
        """Raise what has ended the thread: without the store nothing can be agreed."""
        if self._error is not None:
            raise StoreLost("the store of the run's members is gone") from self._error

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._wake.wait(TICK_S)
                self._wake.clear()
                while self._ended:
                    ticket, well = self._ended.popleft()
                    if well:
                        self.members.tell(self.store, ticket)
                    else:
                        self.members.give_up(self.store, ticket[0])
                if time.monotonic() - self._looked >= TICK_S:
                    self._beat()
                    self._look()
        except RuntimeError as error:  # the connection to the store
            self._error = error
            self.members.cut(self.members.generation)

    def _beat(self) -> None:
        self._beats += 1
        self.store.set(key("alive", self.members.me), str(self._beats))
        if self.stop_asked:
            self.store.set(STOP, "1")

    def _look(self) -> None:
        now, members = time.monotonic(), self.members
        generation, ids = members.generation, members.ids
        stopped = now - self._looked > members.silent_s / 2
        self._looked = now
        signs = dict(self._signs)
        for one, (sign, since) in signs.items():
            name = key("alive", one)
            new = self.store.get(name).decode() if sign or self.store.check([name]) else ""
            # After this process itself was stopped, what it knows of the others is too old.
            fresh = new != sign or stopped
            if one in self._signs:
                self._signs[one] = (new, now if fresh else since)
        departures = self.store.add("departures", 0)
        if departures != self._departures:
            self._departures = departures
            self._gone |= {one for one in signs if self.store.check([key("gone", one)])}
        if ids and not members.broken:
            told = self.store.check([key("broken", generation)])
            if told or any(self.silence(one) for one in ids if one in signs):
                members.give_up(self.store, generation)
