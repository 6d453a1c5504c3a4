"""Process groups whose members may be lost: making one, and ending what is under way on it.

The default group of a worker is the world of its own replica. It is made once, so that whatever
PyTorch keeps inside a replica (DistributedDataParallel, fully_shard, DeviceMesh) never sees other
replicas come and go. The groups of a generation have members of other replicas, whom the default
one does not know (`make_group`). They end by `destroy_process_group(group)`, as all others do.

**gloo** cannot be told to give up a collective: a worker whose peer is stopped or unreachable waits
for its time-out, which must be longer than any replica computes. A connection that is shut down on
this side ends the collectives on it with an error at once (`Sockets`).

About 5 % of cut collectives never return: gloo fails those that wait to send or to receive, but not
one of which a part is on its way (tests/engine/test_sockets.py). So wait as co2/comm/waiting.py
does. gloo closes the cut connections and fails their collectives within two milliseconds; we time
out 0.1 s after all are closed. Work that is incomplete then is leaked on purpose, because
destroying its process group would wait for it too.

Nothing says which connections are gloo's. Known are those that were opened while a group was made,
by whatever thread; of these gloo's lead to or from a port at which a member of the group listens.

**NCCL** waits on the GPU for as long as the others need, and with it the stream that it is on.
Aborting its communicator ends it (`abort`). No error is raised then, and what it leaves in its
buffer means nothing: whoever waits for it has to ask whether it was aborted (`Sockets.were_cut`).
"""

import contextlib
import os
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_OWN = Path("/proc/self/fd")
_CLOSED_S = 0.1
"""Grace period for gloo to fail pending work after it has closed the last connection."""
_GRACE_S = 1.0
"""How long a thread of ours may take to end after a cut, or gloo to close a connection."""


class Sockets:
    """TCP connections of this process: those opened inside `opening()`, minus those that `keep`
    drops."""

    def __init__(self) -> None:
        self._own: set[str] = set()
        self._before: set[str] | None = None
        """While some are opened: all that there were before."""
        self._cut: set[str] = set()
        self._cut_at = self._closed_at = float("inf")

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Context in which sockets are opened. One thread at a time may enter it."""
        self._before = set(_open_sockets())
        try:
            yield
        finally:
            self._own, self._before = self._mine(), None

    def listening(self) -> list[int]:
        """The ports at which they listen."""
        return [one.getsockname()[1] for _, one in self._each() if _listens(one)]

    def keep(self, ports: Collection[int]) -> None:
        """Drop all that neither lead to one of these ports nor come from one: others have opened
        them."""
        self._own = {name for name, one in self._each() if not _ports(one).isdisjoint(ports)}

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
        """Fail them once the other machine has not confirmed for so long that data arrived; the
        kernel would try for a quarter of an hour."""
        for _, one in self._each():
            with contextlib.suppress(OSError):  # no connection by TCP
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))

    def closed(self) -> bool:
        """Whether gloo closed all that were cut at least a moment ago. To be polled."""
        if self.were_cut and self._cut.isdisjoint(_open_sockets()):
            self._closed_at = min(self._closed_at, time.monotonic())
        return time.monotonic() - self._closed_at > _CLOSED_S

    def give_up(self) -> bool:
        """Whether pending work counts as leaked: the grace period after the cut is over."""
        return time.monotonic() - self._cut_at > _GRACE_S

    def _mine(self, names: Iterable[str] | None = None) -> set[str]:
        """Their names, of those that are open."""
        names, before = _open_sockets() if names is None else names, self._before
        opening = set() if before is None else {name for name in names if name not in before}
        return self._own.intersection(names) | opening

    def _each(self) -> Iterator[tuple[str, socket.socket]]:
        found = _open_sockets()
        for name in self._mine(found):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(found[name])) as one:
                yield name, one


def _listens(one: socket.socket) -> bool:
    return one.family in (socket.AF_INET, socket.AF_INET6) and bool(
        one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )


def _ports(one: socket.socket) -> set[int]:
    """At both ends; empty for what is no TCP."""
    found: set[int] = set()
    if one.family in (socket.AF_INET, socket.AF_INET6):
        for ask in (one.getsockname, one.getpeername):
            with contextlib.suppress(OSError):  # it is connected to nobody
                found.add(ask()[1])
    return found


def _open_sockets() -> dict[str, int]:
    """By the kernel's name of a socket: its file descriptor here."""
    found = {}
    for path in _OWN.iterdir() if _OWN.exists() else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            name = str(path.readlink())
            if name.startswith("socket:"):
                found[name] = int(path.name)
    return found


def make_group(
    name: str, store: dist.Store, rank: int, size: int, backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Make a process group, while its other members make it too.

    Args:
        name: which no other group of this process has; equal on all members.
        rank: of this worker in it.
        size: number of members.
        backend, timeout: as `init_process_group` takes them.
    Raises:
        RuntimeError: a member is lost, or does not come in time.
    """
    c10d = dist.distributed_c10d
    # No ranks: PyTorch would look for them in the default group.
    helper = c10d._new_process_group_helper
    group, _ = helper(size, rank, [], backend, store, c10d.GroupName(name), timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    # PyTorch asks for a worker's rank in a group by its rank in the default one.
    c10d._world.pg_group_ranks[group] = {dist.get_rank(): rank}
    return group


def expect_losses() -> None:
    """Leave it to the members to find out who is lost. An error that a thread of PyTorch's beside
    NCCL acted upon would end the process. Before the first group is made."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"


def nccl_backends(groups: Iterable[dist.ProcessGroup]) -> list[Any]:
    """NCCL's parts of process groups. Any: PyTorch gives them no common type."""
    # At one moment, because the thread that trains may be making another.
    found = [group for group in tuple(groups) if "nccl" in dist.get_backend_config(group)]
    return [group._get_backend(torch.device("cuda")) for group in found]


def abort(backends: Sequence[Any]) -> None:
    """End all that is under way on these of NCCL's. Any thread may call it."""
    if not backends:
        return
    # As one: the memory of an aborted communicator is freed when the device stands still, which the
    # kernel of another one may prevent.
    backends[0]._group_start()
    try:
        for backend in backends:
            backend.abort()
    finally:
        backends[0]._group_end()
