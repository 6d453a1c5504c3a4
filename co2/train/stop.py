"""Stopping together: a signal reaches one worker, and all stop after the same step, soon.

A worker that has received a signal says so in the store. A thread of every worker looks there, and
answers, once, with the step that is under way:

    n_i    the steps that worker i has made when the one under way is done
    all stop after step max_i n_i

So nobody is asked to stop at a step that it has left behind, and each makes the few steps by which
another is ahead. Nobody waits in a collective for a worker that has stopped: whatever a step
needs, the worker that is furthest ahead has begun it. A worker that has come to its own n_i waits
for the answers of the others, which their threads give at once, whatever they are waiting for.
"""

import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch.distributed as dist

from co2.comm.mesh import Mesh
from co2.elastic.heartbeat import STOP
from co2.elastic.replicas import Replicas
from co2.errors import WorkerLost

LOOK_S = 0.5
"""Between two looks whether anybody wants to stop."""
_POLL_S = 0.02
"""Between two looks whether all have answered."""


def voted(
    replicas: Replicas | None,
    mesh: Mesh,
    signals: Iterable[signal.Signals],
    done: int,
    grace_s: float,
) -> "StopVote":
    """The vote of a run's workers. `replicas` renews the mesh; None where workers are fixed. See
    `StopVote`."""
    if replicas is not None:
        members = replicas.members
        own = members.another_store()
        return StopVote(own, members.me, members.present, signals, done)
    if mesh.num_workers == 1:
        return StopVote(None, 0, tuple, signals, done)
    store = dist.distributed_c10d._get_default_store().clone()
    # The same workers may train one run after another, as in a sweep by srun: each has a vote of
    # its own, or it would take the answers of the run before for those of now.
    number = store.add(f"stop/votes/{mesh.worker}", 1)
    of_run = dist.PrefixStore(f"vote {number}", store)
    return StopVote(of_run, mesh.worker, lambda: range(mesh.num_workers), signals, done, grace_s)


class StopVote:
    """Agrees on the step after which every worker stops. Used as a context manager, it puts back
    the signals' former handlers and mask at its end.

    Args:
        store: what all workers share; None for one.
        me: this worker's number.
        workers: the numbers of all whose answer is needed.
        signals: that ask for a stop.
        done: steps that are done already.
        grace_s: seconds after which a worker without an answer is lost; infinite where `workers`
            leaves out those that are.
    """

    def __init__(
        self,
        store: dist.Store | None,
        me: int,
        workers: Callable[[], Iterable[int]],
        signals: Iterable[signal.Signals],
        done: int = 0,
        grace_s: float = math.inf,
    ) -> None:
        self._received = False
        self._store, self._me, self._workers = store, me, workers
        self._signals, self._done, self._grace_s = tuple(signals), done, grace_s
        self._answer: int | None = None
        """n_i, once somebody has asked."""
        self._last: int | None = None
        """The step after which all stop, once it is known."""
        self._error: Exception | None = None
        """What has ended the thread."""
        self._lock = threading.Lock()
        """Of `_done` and `_answer`."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="stop", daemon=True)

    def __enter__(self) -> "StopVote":
        self._before = {number: signal.signal(number, self._receive) for number in self._signals}
        # Blocked here, they are so in what this thread starts, such as compilers: a signal to all
        # processes does not end those. The handlers are for threads that libraries have started.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        if self._store is not None:
            self._store.set(f"stop/at/{self._me}", f"{socket.gethostname()} {os.getpid()}")
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._store is not None:
            self._thread.join()
        # The mask comes first: a signal from the launcher would end the last evaluation; now it
        # waits.
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self, done: int) -> bool:
        """Whether to stop now. Called after every step but the last, with the steps done."""
        if self._store is None:
            return self._told()
        if self._error is not None:
            raise self._error
        with self._lock:
            self._done = done
            if self._answer is None:
                return False
        if self._last is None:
            self._last = self._agreed(self._store)
        return done >= self._last

    def _agreed(self, store: dist.Store) -> int:
        """Wait until all have answered. The first to see that stores the last step. Raises
        `WorkerLost` if a worker of a fixed number gives no answer."""
        began = time.monotonic()
        while not (found := store.compare_set("stop/after", "", "")):
            answers = [f"stop/{one}" for one in self._workers()]
            if store.check(answers):
                last = max(map(int, store.multi_get(answers)))
                store.compare_set("stop/after", "", str(last))
            elif self._grace_s < math.inf and self._one_has_ended(store):
                raise WorkerLost("it has ended")
            elif time.monotonic() - began > self._grace_s:
                waited = f"checkpoint.grace_s={self._grace_s:g} seconds"
                raise WorkerLost(f"it has not said in {waited} after which step it can stop")
            else:
                time.sleep(_POLL_S)
        return int(found)

    def _one_has_ended(self, store: dist.Store) -> bool:
        """Whether a worker of this machine that has not answered is gone."""
        silent = [one for one in self._workers() if not store.check([f"stop/{one}"])]
        known = [f"stop/at/{one}" for one in silent if store.check([f"stop/at/{one}"])]
        places = [place.decode().rsplit(" ", 1) for place in map(store.get, known)]
        here = socket.gethostname()
        return any(host == here and not Path(f"/proc/{pid}").exists() for host, pid in places)

    def _look(self) -> None:
        """In the thread. The worker itself notices if the store is gone."""
        try:
            with contextlib.suppress(dist.DistError):
                self._answer_if_asked()
        except Exception as error:  # or all the others would wait for this one's answer
            self._error = error

    def _answer_if_asked(self) -> None:
        assert self._store is not None
        told = ended = False
        while self._answer is None:
            if not told and self._told():
                self._store.add(STOP, 1)
                told = True
            if ended or self._store.add(STOP, 0) > 0:
                with self._lock:
                    self._answer = self._done + 1
                self._store.set(f"stop/{self._me}", str(self._answer))
            else:
                ended = self._over.wait(LOOK_S)

    def _told(self) -> bool:
        """Whether this worker has received a signal."""
        return self._received or not signal.sigpending().isdisjoint(self._signals)

    def _receive(self, *_: object) -> None:
        self._received = True
