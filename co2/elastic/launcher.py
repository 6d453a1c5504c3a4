"""Starting the workers of a run that may lose some, and start them again.

torchrun ends all workers of a node when one is lost, so it cannot be used here. The process that
starts the workers tells the others in their store (co2/elastic/store.py) when one is gone, sooner
than its silence would.
"""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist

from co2 import faults, forked
from co2.comm.waiting import forgotten, is_loss
from co2.config import Config, LaunchConfig
from co2.elastic.heartbeat import announce_gone
from co2.elastic.members import Expelled, Members, StoreLost, ThreadFailed, Unreachable
from co2.elastic.replicas import Replicas
from co2.elastic.store import FINAL, OwnStore, SharedStore
from co2.errors import PREEMPTED, exit_at_once, from_outside, require
from co2.methods.base import QUORUM, Method

_LOOK_S = 0.5
_END_S = 10.0
"""In which a worker that finds the store gone ends by itself."""
_STORE_GONE = "what holds the store is gone; the same command goes on from the last checkpoint"
_place: tuple[Callable[..., Members], tuple[int, ...]] | None = None
"""In a worker: what makes it a member with a backend, and with whom it begins."""
_current: Replicas | None = None


def replicas(device: torch.device, backend: str) -> Replicas | None:
    """Those of the elastic run that this process is a worker of; None if it is of none. The first
    call waits until they train together: what takes long should be done before.

    Args:
        device: where this one trains; a GPU becomes the current one.
        backend: of their process groups, as `init_process_group` takes it.
    """
    global _current
    if _current is None and _place is not None:
        make, first = _place
        if device.type == "cuda":
            torch.cuda.set_device(device)
        members = make(backend=backend)
        faults.share(members.store)
        if first:
            members.first(first)
        else:
            members.join()
            members.store.set(f"joined/{members.me}", "1")
        _current = Replicas(members, device)
    return _current


def check(config: Config, method: Method, started: bool) -> None:
    """Refuse an elastic run that cannot be one, before any worker starts. Raises `ConfigError`.

    Args:
        started: whether torchrun or srun has started this process.
    """
    quorum, size = config.launch.quorum, config.mesh.replica_size
    if not config.launch.elastic:
        hint = "is for elastic runs; use null, or launch.elastic=true"
        require(quorum is None, "launch.quorum", quorum, hint)
        return
    if quorum is not None:
        method.refuse(QUORUM, quorum)
        hint = "a replica of several workers makes all its steps; use null"
        require(size == 1, "launch.quorum", quorum, hint)
    replicas, needed = config.launch.workers // size, config.launch.min_replicas
    hint = f"must be at most launch.workers / mesh.replica_size, which is {replicas}"
    enough = needed <= replicas or config.launch.store is not None
    require(enough, "launch.min_replicas", needed, hint)
    key, value = "launch.elastic", "true"
    method.refuse(key, value)
    hint = "train.py starts the workers of an elastic run itself; start it without torchrun or srun"
    require(not started, key, value, hint)


@dataclass(frozen=True)
class Orders:
    """What the process that starts workers has been told."""

    stop: threading.Event = field(default_factory=threading.Event)
    """To stop, which it hands on to its workers."""
    kill: threading.Event = field(default_factory=threading.Event)
    """To kill them all: then no other is started."""


def launch(
    worker: Callable[[int], int], config: LaunchConfig, replica_size: int, orders: Orders
) -> int:
    """Run `worker(number)` in `config.workers` processes of this machine, and in others where some
    are lost.

    Args:
        replica_size: processes of a replica, which are lost and started together. They have
            successive numbers, the first of which this divides.
    Returns:
        The exit status: 0 if any worker succeeded (the survivors finish together).
    Raises:
        ConfigError: the store of a run on several machines cannot be reached.
    """
    store = OwnStore() if config.store is None else SharedStore(config)
    starter = _Starter(worker, config, replica_size, store)
    try:
        try:
            status = starter.run(orders)
        except forked.ServerLost:
            status = starter.end_without_server()
        return store.leave(status)
    except dist.DistNetworkError:
        return starter.end_without_store()


class _Starter:
    """The workers that this process has started."""

    def __init__(
        self,
        worker: Callable[[int], int],
        config: LaunchConfig,
        replica_size: int,
        place: OwnStore,
    ) -> None:
        self._worker, self._config, self._place = worker, config, place
        self._replica_size = replica_size
        self._store = place.store
        self._restarts = config.restarts
        self._running: dict[int, BaseProcess] = {}
        self._local_ranks: dict[int, int] = {}
        self._statuses: dict[int, int] = {}
        # An interpreter in a lost one's place would take some rounds of the others to start.
        self._context = forked.context()

    def run(self, orders: Orders) -> int:
        """Start them, and others where some are lost, until all have ended. Returns the status."""
        forked.import_all(self._context)  # a machine that says nothing meanwhile counts as lost
        found = self._place.begin(self._config.workers, orders.stop)
        if found is None:
            return PREEMPTED
        own, first = found
        for local_rank, number in enumerate(own):
            self._start(number, local_rank, first)
        given_up = False
        while self._running:
            wait([process.sentinel for process in self._running.values()], _LOOK_S)
            self._look(orders)
            if not self._running:
                break
            inside = any(
                number in first or self._store.check([f"joined/{number}"])
                for number in self._running
            )
            over = self._place.is_over(inside)
            given_up = not over and not inside and orders.stop.is_set()
            if over or given_up:
                self._kill()
        return PREEMPTED if given_up else self._status()

    def end_without_server(self) -> int:
        """The fork server is gone: nobody learns how workers end. Returns the exit status."""
        for process in self._running.values():
            forked.kill(process)
        announce_gone(self._store, *self._running)
        print(f"error: {forked.SERVER_LOST}", file=sys.stderr, flush=True)
        return PREEMPTED

    def end_without_store(self) -> int:
        """The store is gone, and nothing can be agreed. Returns the exit status."""
        for process in self._running.values():
            process.join(_END_S)  # it finds that out itself
        self._kill()
        for number, process in self._running.items():
            process.join()
            self._statuses[number] = process.exitcode or 0
        print(f"error: {_STORE_GONE}", file=sys.stderr, flush=True)
        final = [status for status in self._statuses.values() if status in (0, *FINAL)]
        return min(final, default=PREEMPTED)

    def _start(self, number: int, local_rank: int, first: tuple[int, ...]) -> None:
        self._local_ranks[number] = local_rank
        silent_s, size = self._config.silent_s, self._replica_size
        make = partial(Members, self._place.address, number, silent_s, replica_size=size)
        arguments = (self._worker, number, (make, first), local_rank, self._config.workers)
        process = self._context.Process(target=_work, args=arguments)
        forked.start(process)
        self._running[number] = process

    def _look(self, orders: Orders) -> None:
        """See who has ended, tell the others, and start others in their place."""
        for number, process in list(self._running.items()):
            status = process.exitcode
            if status is None:
                # One that the others have given up, because it was silent, must not come back.
                if self._store.check([f"lost/{number}"]):
                    process.kill()
            elif forked.server_lost(process.pid, status):
                raise forked.ServerLost
            elif number in self._running and status not in (0, *FINAL):
                self._replace(number // self._replica_size, orders)
            elif number in self._running:  # the others of its replica end by themselves
                del self._running[number]
                self._statuses[number] = status
                if status != 0:
                    announce_gone(self._store, number)

    def _replace(self, replica: int, orders: Orders) -> None:
        """A worker of a replica is lost: end the replica, tell the others, and start another."""
        size = self._replica_size
        numbers = range(replica * size, (replica + 1) * size)
        announce_gone(self._store, *numbers)
        for number in numbers:
            process = self._running.pop(number, None)
            if process is not None:
                process.kill()
                process.join()
                self._statuses[number] = process.exitcode or 0
        final = any(self._statuses[number] in (0, *FINAL) for number in numbers)
        others = self._running or not self._place.alone
        if others and self._restarts > 0 and not final and not orders.kill.is_set():
            self._restarts -= 1
            first = self._place.new_numbers(size)
            for number in numbers:
                self._start(first + number % size, self._local_ranks[number], ())

    def _kill(self) -> None:
        self._restarts = 0
        for process in self._running.values():
            process.kill()

    def _status(self) -> int:
        if 0 in self._statuses.values():
            return 0
        ended = [status for status in self._statuses.values() if status >= 0]
        if not ended:
            each = self._statuses.items()
            how = ", ".join(f"{number} with status {status}" for number, status in each)
            print(f"error: all workers were lost: {how}", file=sys.stderr, flush=True)
        return max(ended, default=128 - min(self._statuses.values()))


def _work(
    worker: Callable[[int], int],
    number: int,
    place: tuple[Callable[..., Members], tuple[int, ...]],
    local_rank: int,
    local_world: int,
) -> None:
    """What a started process does."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world))
    # By which a worker picks its GPU, as under torchrun.
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_world))
    forked.end_with_starter(_END_S)  # where the store is gone too, the worker says so itself
    global _place
    _place = place
    try:
        status = worker(number)
        if _current is not None:
            _current.members.leave()
    except Exception as error:
        text = _reason(error)
        if text is None:  # a bug
            traceback.print_exc()
        else:
            print(f"error: worker {number}: {text}", file=sys.stderr, flush=True)
        status = 1
    if status or forgotten():
        exit_at_once(status)  # threads of lost groups may still wait for somebody


def _reason(error: Exception) -> str | None:
    """What has ended a worker, in one line; None where that is a bug."""
    if isinstance(error, Expelled | ThreadFailed):
        return str(error)
    if isinstance(error, Unreachable):
        return f"{error}; name a network that all machines share in GLOO_SOCKET_IFNAME"
    if isinstance(error, StoreLost | dist.DistNetworkError):
        return _STORE_GONE
    if is_loss(error):
        if dist.is_initialized() and dist.get_world_size() > 1:
            return "others of its replica are lost, or were others before training began"
        return "others were lost before training began; start it again"
    return from_outside(error)
