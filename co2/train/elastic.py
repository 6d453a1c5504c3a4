"""Starting the workers of a run that may lose some, and start them again.

torchrun ends all workers of a node when one is lost, so it cannot be used here. The process that
starts the workers holds the store in which they agree who trains (co2/comm/members.py), and tells
the others there when one is gone, sooner than its silence would.
"""

import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist

from co2.comm.members import Expelled, Members, StoreLost
from co2.config import CommDevice, Config, LaunchConfig
from co2.errors import DIVERGED, REFUSED, STOPPED, require
from co2.methods.base import Method

_HOST = "127.0.0.1"
_LOOK_S = 0.5
_FINAL = (REFUSED, DIVERGED, *STOPPED)
"""Exit statuses of workers that another attempt would have, too."""
_place: tuple[tuple[str, int], int, tuple[int, ...], float] | None = None
"""In a worker: address of the store, the worker's number, with whom it begins, and `silent_s`."""
_current: Members | None = None


def members() -> Members | None:
    """The members of the elastic run that this process is a worker of; None if it is of none. The
    first call waits until they train together: what takes long should be done before."""
    global _current
    if _current is None and _place is not None:
        address, number, first, silent_s = _place
        _current = Members(address, number, silent_s)
        if first:
            _current.first(first)
        else:
            _current.join()
            _current.store.set(f"joined/{number}", "1")
    return _current


def check(config: Config, method: Method, started: bool, device: str) -> None:
    """Refuse an elastic run that cannot be one, before any worker starts. Raises `ConfigError`.

    Args:
        started: whether torchrun or srun has started this process.
        device: the kind of device that workers train on.
    """
    if not config.launch.elastic:
        return
    key, value = "launch.elastic", "true"
    reason = method.refused_elastic
    require(reason is None, key, value, f"method={config.method}: {reason}; use false")
    hint = "a replica of several workers ends with any of them; use mesh.replica_size=1"
    require(config.mesh.replica_size == 1, key, value, hint)
    hint = "train.py starts the workers of an elastic run itself; start it without torchrun or srun"
    require(not started, key, value, hint)
    hint = "gloo has to carry what replicas exchange; set launch.backend=gloo or comm.device=cpu"
    gloo = device == "cpu" or config.comm.device is CommDevice.cpu
    require(gloo, key, value, hint)


def launch(worker: Callable[[int], int], config: LaunchConfig, killed: threading.Event) -> int:
    """Run `worker(number)` in `config.workers` processes, and in others where some are lost.

    Args:
        killed: set when a person has had all workers killed: then no other is started.
    Returns:
        The exit status: 0 if any worker has ended well, which only all that are left can do.
    """
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    running: dict[int, BaseProcess] = {}
    first = tuple(range(config.workers))

    def start(number: int, begins: bool) -> None:
        place = (_HOST, store.port), number, first if begins else (), config.silent_s
        process = context.Process(target=_work, args=(worker, *place))
        process.start()
        running[number] = process

    for number in first:
        start(number, begins=True)
    next_number, restarts = config.workers, config.restarts
    statuses: dict[int, int] = {}
    while running:
        wait([process.sentinel for process in running.values()], _LOOK_S)
        for number, process in list(running.items()):
            status = process.exitcode
            if status is None:
                # One that the others have given up, because it was silent, must not come back.
                if store.check([f"lost/{number}"]):
                    process.kill()
                continue
            del running[number]
            statuses[number] = status
            if status == 0:
                continue
            store.set(f"gone/{number}", str(status))
            store.add("departures", 1)
            again = running and restarts > 0 and status not in _FINAL
            if again and not killed.is_set():
                restarts -= 1
                start(next_number, begins=False)
                next_number += 1
        if not any(number in first or store.check([f"joined/{number}"]) for number in running):
            for process in running.values():  # nobody is left who could let them in
                process.kill()
    if 0 in statuses.values():
        return 0
    how = ", ".join(f"{number} with status {status}" for number, status in statuses.items())
    ended = [status for status in statuses.values() if status >= 0]
    if not ended:
        print(f"error: all workers were lost: {how}", file=sys.stderr, flush=True)
    return max(ended, default=128 - min(statuses.values()))


def _work(
    worker: Callable[[int], int],
    address: tuple[str, int],
    number: int,
    first: tuple[int, ...],
    silent_s: float,
) -> None:
    """What a started process does."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(1, len(first))))
    global _place
    _place = address, number, first, silent_s
    try:
        status = worker(number)
        if _current is not None:
            _current.leave()
    except Exception as error:
        text = _reason(error)
        if text is None:  # a bug
            traceback.print_exc()
        else:
            print(f"error: worker {number}: {text}", file=sys.stderr, flush=True)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        os._exit(status)  # threads of lost groups may still wait for somebody


def _reason(error: Exception) -> str | None:
    """What has ended a worker, in one line; None where that is no loss of others."""
    if isinstance(error, Expelled):
        return str(error)
    if isinstance(error, StoreLost | dist.DistNetworkError):
        return "what started it is gone; the same command goes on from the last checkpoint"
    if isinstance(error, RuntimeError) and "closed by peer" in str(error):
        return "others were lost before training began; start it again"
    return None
