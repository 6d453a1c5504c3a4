"""Starting the workers of a run that may lose some, and start them again.

torchrun ends all workers of a node when one is lost, so it cannot be used here. The process that
starts the workers tells the others in their store (co2/elastic/store.py) when one is gone, sooner
than its silence would.
"""

import os
import sys
import traceback
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from co2.comm.waiting import has_leaked, is_loss
from co2.config import Config, LaunchConfig
from co2.elastic.heartbeat import announce_gone
from co2.elastic.members import Expelled, Members, StoreLost, ThreadFailed, Unreachable
from co2.elastic.store import FINAL, OwnStore, SharedStore
from co2.errors import PREEMPTED, exit_at_once, from_outside, require
from co2.methods.base import QUORUM, Method
from co2.start.here import HERE
from co2.start.processes import (
    SERVER_LOST,
    ServerLost,
    Workers,
    cores_of_each,
    end_with_starter,
    stop_signals,
)

_LOOK_S = 0.5
_END_S = 10.0
"""In which a worker that finds the store gone ends by itself."""
_STORE_GONE = "what holds the store is gone; the same command goes on from the last checkpoint"


def check(config: Config, method: Method, started: bool) -> None:
    """Refuse an elastic run that cannot be one, before any worker starts. Raises `ConfigError`.

    Args:
        started: whether torchrun or srun has started this process.
    """
    quorum, size = config.launch.quorum, config.mesh.replica_size
    if not config.launch.elastic:
        for key, off in (("quorum", None), ("restarts", 0)):
            given, none = getattr(config.launch, key), "null" if off is None else off
            hint = f"is for elastic runs; use {none}, or launch.elastic=true"
            require(given == off, f"launch.{key}", given, hint)
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


def launch(worker: Callable[[int], int], config: LaunchConfig, replica_size: int) -> int:
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
    with Workers(stop_signals()) as workers:
        store = OwnStore() if config.store is None else SharedStore(config)
        starter = _Starter(worker, config, replica_size, store, workers)
        try:
            try:
                status = starter.run()
            except ServerLost:
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
        workers: Workers,
    ) -> None:
        self._worker, self._config, self._place = worker, config, place
        self._replica_size, self._workers = replica_size, workers
        self._store = place.store
        self._restarts = config.restarts
        self._local_ranks: dict[int, int] = {}

    def run(self) -> int:
        """Start them, and others where some are lost, until all have ended. Returns the status."""
        workers = self._workers
        workers.import_all()  # a machine that says nothing meanwhile counts as lost
        found = self._place.begin(self._config.workers, self._told_within)
        if found is None:
            return PREEMPTED
        own, first = found
        for local_rank, number in enumerate(own):
            self._start(number, local_rank, first)
        given_up = False
        while workers.running:
            self._look()
            if not workers.running:
                break
            inside = any(
                number in first or self._store.check([f"joined/{number}"])
                for number in workers.running
            )
            over = self._place.is_over(inside)
            given_up = not over and not inside and workers.told_to_stop
            if over or given_up:
                self._restarts = 0
                workers.kill()
        return PREEMPTED if given_up else self._status()

    def end_without_server(self) -> int:
        """The fork server is gone: nobody learns how workers end. Returns the exit status."""
        numbers = list(self._workers.running)
        self._workers.kill()
        announce_gone(self._store, *numbers)
        print(f"error: {SERVER_LOST}", file=sys.stderr, flush=True)
        return PREEMPTED

    def end_without_store(self) -> int:
        """The store is gone, and nothing can be agreed. Returns the exit status."""
        self._workers.end(_END_S)  # a worker finds that out itself
        print(f"error: {_STORE_GONE}", file=sys.stderr, flush=True)
        final = [status for status in self._workers.statuses.values() if status in (0, *FINAL)]
        return min(final, default=PREEMPTED)

    def _told_within(self, seconds: float) -> bool:
        self._workers.wait(seconds)
        return self._workers.told_to_stop

    def _start(self, number: int, local_rank: int, first: tuple[int, ...]) -> None:
        self._local_ranks[number] = local_rank
        make = partial(
            Members,
            self._place.address,
            number,
            self._config.silent_s,
            replica_size=self._replica_size,
        )
        join = partial(_join, make, first)
        place = (local_rank, self._config.workers)
        self._workers.start(number, _work, self._worker, number, join, *place)

    def _look(self) -> None:
        """See who has ended, tell the others, and start others in their place."""
        ended = self._workers.wait(_LOOK_S)
        lost = [number for number, status in ended.items() if status not in (0, *FINAL)]
        for replica in sorted({number // self._replica_size for number in lost}):
            self._replace(replica)
        # After a final status the others of the replica end by themselves.
        gone = [number for number, status in ended.items() if status in FINAL]
        if gone:
            announce_gone(self._store, *gone)
        # One that the others have given up, because it was silent, must not come back.
        given_up = [one for one in self._workers.running if self._store.check([f"lost/{one}"])]
        for number in given_up:
            self._workers.running[number].kill()

    def _replace(self, replica: int) -> None:
        """A worker of a replica is lost: end the replica, tell the others, and start another."""
        size, workers = self._replica_size, self._workers
        numbers = range(replica * size, (replica + 1) * size)
        announce_gone(self._store, *numbers)
        workers.kill(numbers)
        final = any(workers.statuses[number] in (0, *FINAL) for number in numbers)
        others = workers.running or not self._place.alone
        if others and self._restarts > 0 and not final and not workers.told_to_kill:
            self._restarts -= 1
            first = self._place.new_numbers(size)
            for number in numbers:
                self._start(first + number % size, self._local_ranks[number], ())

    def _status(self) -> int:
        if 0 in self._workers.statuses.values():
            return 0
        ended = [status for status in self._workers.statuses.values() if status >= 0]
        if not ended:
            each = self._workers.statuses.items()
            how = ", ".join(f"{number} with status {status}" for number, status in each)
            print(f"error: all workers were lost: {how}", file=sys.stderr, flush=True)
        return max(ended, default=128 - min(self._workers.statuses.values()))


def _join(make: Callable[..., Members], first: tuple[int, ...], backend: str) -> Members:
    """Become a member: of the first generation, or once the others let this one in."""
    members = make(backend=backend)
    HERE.store = members.store
    if first:
        members.first(first)
    else:
        members.join()
        members.store.set(f"joined/{members.me}", "1")
    return members


def _work(
    worker: Callable[[int], int],
    number: int,
    join: Callable[[str], Members],
    local_rank: int,
    local_world: int,
) -> None:
    """The main function of a worker's process."""
    torch.set_num_threads(cores_of_each(local_world))
    # By which a worker picks its GPU, as under torchrun.
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_world))
    end_with_starter(_END_S)  # where the store is gone too, the worker says so itself
    HERE.join = join
    try:
        status = worker(number)
        if HERE.replicas is not None:
            HERE.replicas.members.leave()
    except Exception as error:
        text = _reason(error)
        if text is None:  # a bug
            traceback.print_exc()
        else:
            print(f"error: worker {number}: {text}", file=sys.stderr, flush=True)
        status = 1
    if status or has_leaked():
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
