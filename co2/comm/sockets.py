"""The TCP connections that this process has opened since some moment, and cutting them.

gloo cannot be told to give up a collective: a worker whose peer is stopped or unreachable waits for
its time-out, which must be longer than any replica computes. A connection that is shut down on this
side ends every collective on it with an error at once.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_OWN = Path("/proc/self/fd")


class Sockets:
    """The connections opened since this object was made, until `freeze`."""

    def __init__(self) -> None:
        self._before = set(_open_sockets())
        self._own: set[str] | None = None

    def freeze(self) -> None:
        """Later connections are somebody else's."""
        self._own = set(_open_sockets()) - self._before

    def cut(self) -> None:
        """Shut them down. May be called by any thread, and again."""
        for one in self._each():
            with contextlib.suppress(OSError):
                one.getpeername()  # fails for one that listens: gloo cannot do without it
                one.shutdown(socket.SHUT_RDWR)

    def give_up_after(self, seconds: float) -> None:
        """End them with an error once what was sent has not arrived for so long, because the other
        machine is gone; the kernel would try for a quarter of an hour."""
        for one in self._each():
            with contextlib.suppress(OSError):  # no connection by TCP
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))

    def _each(self) -> Iterator[socket.socket]:
        for name, number in _open_sockets().items():
            own = name not in self._before if self._own is None else name in self._own
            if own:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
                    yield one


def _open_sockets() -> dict[str, int]:
    """By the kernel's name of a socket: its file descriptor here."""
    found = {}
    for path in _OWN.iterdir() if _OWN.exists() else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            name = str(path.readlink())
            if name.startswith("socket:"):
                found[name] = int(path.name)
    return found
