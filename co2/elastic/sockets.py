"""The TCP connections that this process has opened since some moment, and cutting them.

gloo cannot be told to give up a collective: a worker whose peer is stopped or unreachable waits for
its time-out, which must be longer than any replica computes. A connection that is shut down on this
side ends the collectives on it with an error at once.

About 5 % of cut collectives never return: gloo fails those that wait to send or to receive, but not
one of which a part is on its way (tests/engine/test_sockets.py). So wait as
co2/comm/waiting.py does. gloo closes the cut connections and fails their collectives within two
milliseconds; we time out 0.1 s after all are closed. Work that is incomplete then is leaked on
purpose, because destroying its process group would wait for it too.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

_OWN = Path("/proc/self/fd")
_CLOSED_S = 0.1
"""Grace period for gloo to fail pending work after it has closed the last connection."""
_GRACE_S = 1.0
"""How long a thread of ours may take to end after a cut, or gloo to close a connection."""


class Sockets:
    """The connections opened since this object was made, until `freeze`."""

    def __init__(self) -> None:
        self._before = set(_open_sockets())
        self._own: set[str] | None = None
        self._cut: set[str] = set()
        self._cut_at = self._closed_at = float("inf")

    def freeze(self) -> None:
        """Later connections are somebody else's."""
        self._own = set(_open_sockets()) - self._before

    def cut(self) -> None:
        """Shut them down. May be called by any thread, and again."""
        self._cut_at = min(self._cut_at, time.monotonic())
        for name, one in self._each():
            with contextlib.suppress(OSError):
                one.getpeername()  # fails for one that listens: gloo cannot do without it
                one.shutdown(socket.SHUT_RDWR)
                self._cut.add(name)

    @property
    def were_cut(self) -> bool:
        """Whether `cut` was called."""
        return self._cut_at < float("inf")

    def give_up_after(self, seconds: float) -> None:
        """End them with an error once what was sent has not arrived for so long, because the other
        machine is gone; the kernel would try for a quarter of an hour."""
        for _, one in self._each():
            with contextlib.suppress(OSError):  # no connection by TCP
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))

    def closed(self) -> bool:
        """Whether gloo has closed all that were cut, a moment ago or longer. Ask it again and
        again."""
        if self.were_cut and self._cut.isdisjoint(_open_sockets()):
            self._closed_at = min(self._closed_at, time.monotonic())
        return time.monotonic() - self._closed_at > _CLOSED_S

    def give_up(self) -> bool:
        """Whether pending work counts as leaked: the grace period after the cut is over."""
        return time.monotonic() - self._cut_at > _GRACE_S

    def _each(self) -> Iterator[tuple[str, socket.socket]]:
        for name, number in _open_sockets().items():
            own = name not in self._before if self._own is None else name in self._own
            if own:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
                    yield name, one


def _open_sockets() -> dict[str, int]:
    """By the kernel's name of a socket: its file descriptor here."""
    found = {}
    for path in _OWN.iterdir() if _OWN.exists() else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            name = str(path.readlink())
            if name.startswith("socket:"):
                found[name] = int(path.name)
    return found
