"""run: train replicas on this machine, from a notebook, a script or a test.

Each replica is a process of its own, as under torchrun, so every method trains as it does there, on
PyTorch's own DDP, gloo and NCCL. Threads would share torch's default random generator, which
`torch.manual_seed` and dropout use, its default process group, and the interpreter's lock; and
nothing ends a thread whose training nobody wants any more.

Python's fork server starts the processes (co2/start/processes.py). A plain fork would not do: a
process that has used CUDA cannot be forked, and a notebook's has threads that may hold locks
meanwhile. What a cell or a script defines is sent by cloudpickle, because pickle sends functions
and classes by name only, which does for what a replica can import.
"""

import io
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, Pipe, wait
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from co2 import gpus
from co2.comm.mesh import Mesh
from co2.comm.waiting import is_loss
from co2.errors import ConfigError, WorkerLost, exit_at_once, require, require_count
from co2.randomness import seed_everything
from co2.start.processes import LOCAL, Workers, cores_of_each, end_with_starter

T = TypeVar("T")

_CAUSE_S = 10.0
"""How long a replica's loss of another waits for the one that is the cause to tell, or to end: its
sockets are closed before its pipe is."""


class InReplica(Exception):
    """The cause of what `run` raises: the number of the replica, and the traceback there."""


def run(
    train: Callable[..., T], *args: object, replicas: int = 2, device: str | None = None
) -> list[T]:
    """Call `train(mesh, *args)` in each of several new processes, and return what each returned, in
    the order of the replicas.

        def train(mesh):
            sync = co2.CO2(tau=12)
            model = sync.prepare(model, optimizer, mesh)
            ...

        losses = co2.run(train, replicas=4)

    With cloudpickle installed, `train` may be defined in a notebook's cell or in a script. It works
    on copies of what it uses, so give back what you want to keep: numbers, tensors, a
    `state_dict()`, but no DistributedDataParallel. The default random generators of a replica are
    seeded with its number.

    Args:
        train: called with the mesh of the replica and `args`.
        replicas: how many. They divide the CPU's cores among them.
        device: cpu or cuda. None: cuda where there is a GPU. Replicas share GPUs where there are
            fewer; see `gpus.share`.
    Raises:
        ConfigError: a value is wrong, or cloudpickle is missing and needed.
        Exception: what a replica has raised, with `InReplica` as its cause. All others are killed.
        WorkerLost: a replica was killed.
        KeyboardInterrupt: after Ctrl-C, which kills all.
    """
    require_count("replicas", replicas)
    require(device in (None, "cpu", "cuda"), "device", device, "use cpu, cuda or None")
    found = device != "cuda" or torch.cuda.device_count() > 0
    require(found, "device", device, "there is no GPU here; use cpu or None")
    job = _packed((train, args))
    store = dist.TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False)
    with Workers() as workers, ExitStack() as opened:
        connections = []
        for replica in range(replicas):
            here, there = Pipe()
            connections.append(opened.enter_context(here))
            place = (replica, replicas, store.port, device, dict(os.environ))
            with there, _without_main():
                workers.start(replica, _replica, there, *place)
        for connection in connections:
            with suppress(ConnectionError):  # it has ended, which shows below
                connection.send_bytes(job)
        return [_pickler().loads(result) for result in _results(connections, workers)]


def _pickler() -> ModuleType:
    try:
        import cloudpickle
    except ImportError:
        return pickle
    return cloudpickle


class _ByName(pickle.Pickler):
    """Refuses what this script or notebook defines, whose name means nothing in a replica."""

    def reducer_override(self, thing: Any) -> Any:
        if getattr(thing, "__module__", None) == "__main__":
            raise pickle.PicklingError
        return NotImplemented


def _packed(job: object) -> bytes:
    """What a replica works on. Raises `ConfigError` where only cloudpickle could send it."""
    if _pickler() is not pickle:
        return bytes(_pickler().dumps(job))
    out = io.BytesIO()
    try:
        _ByName(out).dump(job)
    except (AttributeError, pickle.PicklingError):  # a function inside another is either
        hint = (
            "co2.run sends by it what a notebook, a script or another function defines; pip "
            "install cloudpickle, or give a function of a module that can be imported"
        )
        raise ConfigError("cloudpickle", "missing", hint) from None
    return out.getvalue()


@contextmanager
def _without_main() -> Iterator[None]:
    """Inside, a process that starts does not import a script's main module again, which would run
    the script in each replica. cloudpickle sends what is defined there."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _results(connections: Sequence[Connection], workers: Workers) -> list[bytes]:
    """What the replicas returned, pickled. Raises what `run` does, as soon as one has failed for a
    reason other than that another has gone."""
    results: dict[int, bytes] = {}
    failures: list[Exception] = []
    waiting = {connection: number for number, connection in enumerate(connections)}
    while waiting and all(is_loss(failure) for failure in failures):
        ready = wait(list(waiting), timeout=_CAUSE_S if failures else None)
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            number = waiting.pop(connection)
            try:
                well, content = connection.recv()
            except (EOFError, ConnectionError):
                process = workers.running[number]
                process.join()
                lost = f"replica {number} was killed, or ended by itself: status {process.exitcode}"
                failures.append(WorkerLost(lost))
                continue
            if well:
                results[number] = content
            else:
                error, told = _pickler().loads(content)
                error.__cause__ = InReplica(f"replica {number}:\n{told}")
                failures.append(error)
    if failures:
        raise min(failures, key=is_loss)
    return [results[number] for number in range(len(connections))]


def _replica(
    connection: Connection,
    replica: int,
    replicas: int,
    port: int,
    device: str | None,
    environ: dict[str, str],
) -> None:
    """What the process of a replica does, until it is killed or its starter has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the starter too, which kills
    end_with_starter()
    os.environ.clear()  # the fork server has that of its own start
    os.environ.update(environ)
    for stream in (sys.stdout, sys.stderr):
        # Whole lines, or those of several replicas would mix.
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    torch.set_num_threads(cores_of_each(replicas))
    pickler = _pickler()
    try:
        train, args = pickler.loads(connection.recv_bytes())
        mesh = _join(replica, replicas, port, device)
        seed_everything(0, replica)
        reply = (True, pickler.dumps(train(mesh, *args)))
    except BaseException as error:
        reply = (False, pickler.dumps(_sendable(error)))
    sys.stdout.flush()
    connection.send(reply)
    # Others may still need this one's connections. The starter kills it when all have replied.
    wait([connection])
    exit_at_once(0)


def _join(replica: int, replicas: int, port: int, device: str | None) -> Mesh:
    """Meet the other replicas. Returns the mesh."""
    count = 0 if device == "cpu" else torch.cuda.device_count()
    place, backend = torch.device("cpu"), "gloo"
    if count:
        place, backend = torch.device("cuda", replica % count), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(place)
    if 0 < count < replicas:
        gpus.share()
    store = dist.TCPStore(LOCAL, port, is_master=False)
    dist.init_process_group(backend, store=store, rank=replica, world_size=replicas)
    return Mesh.world(device=place)


def _sendable(error: BaseException) -> tuple[Exception, str]:
    """The error, or one with the same text where it cannot be sent; and its traceback."""
    sent: Exception = RuntimeError(f"{type(error).__name__}: {error}")
    if isinstance(error, Exception):
        pickler = _pickler()
        with suppress(Exception):  # whatever its own code does when it is copied
            sent = pickler.loads(pickler.dumps(error))
    assert error.__traceback__ is not None, "it was caught"
    return sent, "".join(
        traceback.format_exception(type(error), error, error.__traceback__.tb_next)
    )
