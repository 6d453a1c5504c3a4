"""DeadlockWatch: waits for collectives, and notices replicas that wait at different places.

Replicas meet in the means and in the consensus. A loop that enters the consensus on one replica
only, or makes another number of steps on it, leaves that one in the consensus and the others in a
mean that it will never join. So a replica that waits long writes into the default group's store
where it waits, and looks for others that wait elsewhere. A slow network alone is no deadlock.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from co2.comm.mesh import Mesh
from co2.comm.waiting import is_loss
from co2.errors import WorkerLost, WrongCall

LOOK_S = 5.0
"""Seconds after which a replica that waits looks for others, again and again."""
NOTICE_S = 30.0
"""Seconds after which one that waits says so, once."""
_SEEN = 2
"""How often others must be seen waiting elsewhere: the first time the store may tell the past."""
_CONSENSUS, _MEAN, _APART = "consensus", "mean", "apart"
_POLL_S = 0.002


class DeadlockWatch:
    """One of each method.

    Args:
        mesh: the replicas. A single one waits for nobody; elastic ones notice losses themselves.
        group: this worker and its counterparts in the other replicas.
    """

    def __init__(self, mesh: Mesh, group: dist.ProcessGroup | None) -> None:
        self.replica = mesh.replica
        self.steps = 0
        """Steps that this replica has made."""
        self._told: set[str] = set()
        """Places of which a notice was given: on a slow network one is enough."""
        self._store: dist.Store | None = None
        if group is not None and mesh.elastic is None:
            store = distributed_c10d._get_default_store()
            self._store = dist.PrefixStore(f"co2/deadlocks/{group.group_name}", store)

    def finish(self, work: dist.Work, sent: int) -> None:
        """Wait for a collective of gloo's, of a mean that was sent after so many steps.

        Raises:
            WrongCall: another replica waits in a consensus of before.
            WorkerLost: another replica has gone.
            RuntimeError: the collective has failed otherwise.
        """
        self._wait(_of_gloo(work), _MEAN, sent)

    def result(self, carried: Future[None], sent: int) -> None:
        """As `finish`, for a sequence of collectives that a thread carries."""

        def ended(seconds: float) -> bool:
            try:
                carried.result(seconds)
            except NotYet:
                if carried.done():
                    raise
                return False
            return True

        self._wait(ended, _MEAN, sent)

    def gather(self, work: dist.Work, gloo: bool) -> None:
        """Wait for the collective at the head of a consensus.

        Args:
            gloo: whether it is gloo's.
        Raises: as `finish`.
        """
        self._wait(_of_gloo(work) if gloo else _polled(work), _CONSENSUS, self.steps)

    def _wait(self, ended: Callable[[float], bool], place: str, at: int) -> None:
        """Wait until `ended(seconds)` says yes; each call lasts so long at most."""
        try:
            self._look_around(ended, place, at)
        except RuntimeError as error:
            if not is_loss(error):
                raise
            raise WorkerLost(
                f"another replica has gone while replica {self.replica}, after {self.steps} steps, "
                "waited for it: see its own error, and give every replica as many steps"
            ) from error

    def _look_around(self, ended: Callable[[float], bool], place: str, at: int) -> None:
        began, seen = time.monotonic(), 0
        before: bytes | None = None
        """What the store had of others at the look before; None before the first."""
        other = _MEAN if place == _CONSENSUS else _CONSENSUS
        while not ended(LOOK_S):
            if self._store is None:
                continue
            now = time.monotonic()
            self._store.set(place, f"{self.replica} {at} {now}")
            found = self._store.get(other) if self._store.check([other]) else b""
            if before is not None and found not in (b"", before):  # somebody waits there now
                who, where = found.decode().split()[:2]
                apart = int(where) > at if place == _CONSENSUS else int(where) < at
                seen += apart
                if seen == _SEEN:
                    mine, theirs = (place, self.replica, at), (other, int(who), int(where))
                    self._store.set(_APART, _told_apart(*sorted((mine, theirs))))
            if self._store.check([_APART]):  # the others may have gone when this one looks again
                raise WrongCall(self._store.get(_APART).decode())
            before = found
            if place not in self._told and now - began >= NOTICE_S:
                self._told.add(place)
                print(_notice(self.replica, place, at), file=sys.stderr, flush=True)


def _of_gloo(work: dist.Work) -> Callable[[float], bool]:
    def ended(seconds: float) -> bool:
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:  # it has failed, or had not ended yet
            if not work.is_completed():
                return False
            work.wait()
        return True

    return ended


def _polled(work: dist.Work) -> Callable[[float], bool]:
    """For NCCL, whose `wait` lets the host go on."""

    def ended(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not work.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        work.wait()
        return True

    return ended


_CALLS = "consensus(), finish(), save() or resume()"


def _told_apart(shown: tuple[str, int, int], mean: tuple[str, int, int]) -> str:
    return (
        f"replica {shown[1]} is in {_CALLS} after {shown[2]} steps, replica {mean[1]} waits for "
        f"the mean of step {mean[2]}: every replica must make these calls, and as many steps"
    )


def _notice(replica: int, place: str, at: int) -> str:
    where = (
        f"in {_CALLS}, after {at} steps," if place == _CONSENSUS else f"for the mean of step {at}"
    )
    return (
        f"co2: replica {replica} has waited {NOTICE_S:.0f} s {where} for the others: every replica "
        "must make these calls, and as many steps; a slow network may need longer"
    )
