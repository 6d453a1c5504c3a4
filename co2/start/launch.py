"""Starting the workers of a run, or being one of them.

A process is a worker that torchrun or srun has started, or it starts local workers itself.
"""

import contextlib
import gc
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from co2 import gpus, program
from co2.comm.mesh import Mesh
from co2.comm.waiting import is_loss
from co2.config import Config
from co2.elastic.replicas import Replicas
from co2.errors import (
    PREEMPTED,
    REFUSED,
    ConfigError,
    ReplicasDiffer,
    WorkerLost,
    WrongCall,
    exit_at_once,
    from_outside,
)
from co2.start import elastic, failures
from co2.start.here import HERE
from co2.start.identity import Identity, identity, is_first
from co2.start.placement import check_precision, place_of, unusual
from co2.start.processes import (
    LOCAL,
    SERVER_LOST,
    ServerLost,
    Workers,
    allow_files,
    cores_of_each,
    end_with_starter,
    place_sockets,
    stop_signals,
)

_PEER_S = 1.0
"""A worker whose peer is gone ends this many seconds later, so that the run gets the peer's
status."""
_GRACE_S = 30.0
"""In which the others end by themselves where a worker has failed."""
_NOTICE_S = 10.0
"""A worker that has waited so long for the others as a run starts says so."""

Worker = Callable[[Config], None]


def refuse(error: ConfigError) -> int:
    """Print in one line, once, what cannot be run. Returns the exit status."""
    line = f"error: {error}"
    failures.note(line)
    if is_first():
        print(line, file=sys.stderr, flush=True)
    else:
        time.sleep(_PEER_S)  # the first to end has the others killed, who must have spoken by then
    return REFUSED


def run(worker: Worker, config: Config) -> int:
    """Run `worker(config)` in every worker, in a process group. Returns the exit status.

    `worker` is pickled. Raises `ConfigError` where this machine has no place for its sockets.
    """
    allow_files()
    place_sockets()  # those of loading processes, too
    me = identity()
    if me is not None:
        return _as_worker(worker, config, me)
    if line := unusual(config):
        print(line, file=sys.stderr, flush=True)
    if config.launch.elastic:
        size = config.mesh.replica_size
        return elastic.launch(partial(_guarded, worker, config), config.launch, size)
    if config.launch.workers == 1:
        return _guarded(worker, config, 0)
    return _start(worker, config)


def _start(worker: Worker, config: Config) -> int:
    """Run the worker in processes of this machine. Returns the exit status of the first of them
    that fails; the others are told to stop then."""
    number = config.launch.workers
    with Workers(stop_signals()) as workers:
        store = dist.TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False)
        try:
            for rank in range(number):
                me = Identity(rank, number, rank, number, LOCAL, store.port)
                workers.start(rank, _local_worker, worker, config, me)
            while workers.running:
                failed = [status for status in workers.wait().values() if status]
                if failed:
                    workers.tell(signal.SIGTERM)
                    workers.end(_GRACE_S)
                    return failed[0] if failed[0] > 0 else 128 - failed[0]
        except ServerLost:
            print(f"error: {SERVER_LOST}", file=sys.stderr, flush=True)
            return PREEMPTED
    return 0


def _local_worker(worker: Worker, config: Config, me: Identity) -> None:
    end_with_starter()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the starter holds it, and not worker 0
    try:
        status = _as_worker(worker, config, me)
    except Exception:  # a bug
        traceback.print_exc()
        status = 1
    if status:
        exit_at_once(status)


def mesh(config: Config) -> Mesh:
    """The mesh of this worker, whose GPU becomes the current one. In an elastic run the first call
    waits until it is let in: what takes long should be done before. Raises `ConfigError` for a GPU
    that has no bf16 where it is needed."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device, backend = place_of(config, local, local_world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if "nccl" in backend and local_world > torch.cuda.device_count():
            gpus.share()
        check_precision(config, "cuda")
        torch.set_float32_matmul_precision("high")  # what stays fp32 is multiplied in TF32
    if HERE.join is None:
        return Mesh.world(config.mesh.replica_size, device)
    if HERE.replicas is None:
        HERE.replicas = Replicas(HERE.join(backend), device)
    return HERE.replicas.mesh


def _as_worker(worker: Worker, config: Config, me: Identity) -> int:
    """Run `worker(config)` in the process group of all workers. Returns the exit status."""
    os.environ.update(
        RANK=str(me.rank),
        WORLD_SIZE=str(me.world),
        LOCAL_RANK=str(me.local_rank),
        LOCAL_WORLD_SIZE=str(me.local_world),
        MASTER_ADDR=me.address,
        MASTER_PORT=str(me.port),
    )
    torch.set_num_threads(cores_of_each(me.local_world))
    try:
        with _process_group(config, me):
            return _guarded(worker, config, me.rank)
    except Exception as error:
        if not _told(error, me.rank):
            raise
        time.sleep(_PEER_S)  # others ask this one's store whether it has been told
        return REFUSED


@contextlib.contextmanager
def _process_group(config: Config, me: Identity) -> Iterator[None]:
    # A sweep reuses this process, so the process group must not outlive the run.
    device, backend = place_of(config, me.local_rank, me.local_world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with _waiting_for_others(me):
        # The store may still have the addresses that workers had before: in an earlier run of a
        # sweep, or when torchrun starts them again, as with torch 2.15. So each has its own keys.
        whole, runs = _store(me)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt/{attempt}/run/{next(runs)}", whole)
        HERE.store = store
        dist.init_process_group(backend, store=store, rank=me.rank, world_size=me.world)
    try:
        yield
    finally:
        HERE.store = None
        dist.destroy_process_group()
        # What the run has left in cycles keeps gloo's threads. One that lets go of a tensor while
        # the interpreter ends takes the process with it.
        gc.collect()


@cache
def _store(me: Identity) -> tuple[dist.Store, Iterator[int]]:
    """Where the workers meet, and numbers for the runs of this process. All of them meet in one
    store: worker 0 would close it while another worker already looks for the next one."""
    store, *_ = next(rendezvous("env://"))
    return store, itertools.count()


def _told(error: Exception, rank: int) -> bool:
    """Whether the machine has ended this worker, of which a line has told."""
    line = from_outside(error, f"worker {rank}")
    if line is not None:
        failures.tell(f"error: {line}", from_outside(error) or "")
    return line is not None


@contextlib.contextmanager
def _waiting_for_others(me: Identity) -> Iterator[None]:
    """Inside, the first worker of each machine says after a while that others are missing."""
    place = f"{me.address}:{me.port}, which MASTER_ADDR and MASTER_PORT choose"
    text = f"worker {me.rank} waits for the others of {me.world} at {place}; torchrun or srun "
    text += "starts them all"
    notice = threading.Timer(_NOTICE_S, print, (text,), {"file": sys.stderr, "flush": True})
    notice.daemon = True
    if me.local_rank == 0:
        notice.start()
    try:
        yield
    finally:
        notice.cancel()


def _guarded(worker: Worker, config: Config, rank: int) -> int:
    """Run the worker; a user's mistake and the loss of a peer each end it with one line, and a bug
    with one traceback, of the worker that meets it first."""
    program.keep_output(training=True)
    try:
        worker(config)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except (ReplicasDiffer, WrongCall) as error:
        failures.tell(f"error: {error}")
        return 1
    except ConfigError as error:
        # One that shows only in training, such as a damaged file, and perhaps on this worker only.
        failures.tell(f"error: {error}")
        return REFUSED
    except Exception as error:
        if config.launch.elastic and not (
            isinstance(error, OSError) and error.errno in program.NO_ROOM
        ):
            raise
        if _told(error, rank):
            return REFUSED
        if not (isinstance(error, WorkerLost) or is_loss(error)):
            if failures.is_first(f"{type(error).__name__}: {error}"):
                raise
            return 1
        time.sleep(_PEER_S)
        if not failures.are_told():  # whoever is gone was killed
            why = f": {error}" if isinstance(error, WorkerLost) else ""
            failures.tell(f"error: worker {rank} has lost another worker{why}", "a lost worker")
        # Groups do not end before what is under way on them, which may wait for the lost one, and
        # others wait for connections that this process holds.
        exit_at_once(1)
    return 0
