"""Starting the workers of a run, or being one of them.

A process is a worker that torchrun or srun has started, or it starts local workers itself by
torch.distributed's elastic launcher.
"""

import contextlib
import gc
import logging
import multiprocessing
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from co2 import faults, forked, gpus, program
from co2.comm.mesh import Mesh
from co2.comm.waiting import is_loss
from co2.config import CommDevice, Config, LaunchConfig, Precision
from co2.elastic import launcher
from co2.errors import (
    PREEMPTED,
    REFUSED,
    ConfigError,
    ReplicasDiffer,
    WorkerLost,
    WrongCall,
    exit_at_once,
    from_outside,
    require,
)

_PEER_S = 1.0
"""A worker whose peer is gone ends this many seconds later, so that the run gets the peer's
status."""
_FILES = 64
"""Open files that a small run of two workers has."""
_NOTICE_S = 10.0
"""A worker that has waited so long for the others as a run starts says so."""

Worker = Callable[[Config], None]


@dataclass(frozen=True)
class Identity:
    """The place of a worker that torchrun or srun has started."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int


def identity(env: Mapping[str, str] = os.environ) -> Identity | None:
    """The place that torchrun (RANK, …) or srun (SLURM_PROCID, …) gives this process.

    None where neither has started it.

    Raises:
        ConfigError: the variables are no numbers, contradict each other, or are a batch script's.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        world = _number(env, "WORLD_SIZE", "", 1)
        local_world = _number(env, "LOCAL_WORLD_SIZE", "1", 1, world)
        return Identity(
            rank=_number(env, "RANK", "", 0, world - 1),
            world=world,
            local_rank=_number(env, "LOCAL_RANK", "0", 0, local_world - 1),
            local_world=local_world,
            address=env.get("MASTER_ADDR", "127.0.0.1"),
            port=_number(env, "MASTER_PORT", "29500", 0, 65535),
        )
    if "SLURM_PROCID" in env and _number(env, "SLURM_NTASKS", "1", 1) > 1:
        world = _number(env, "SLURM_NTASKS", "", 1)
        step = _number(env, "SLURM_STEP_ID", "0", 0)
        # In a batch script SLURM sets all variables of a task but this one.
        hint = "srun has not started this process, one of so many tasks; start it by: srun python "
        hint += "train.py …; or unset SLURM_NTASKS, and it starts launch.workers here"
        require("SLURM_STEP_ID" in env or "SLURM_JOB_ID" not in env, "SLURM_NTASKS", world, hint)
        per_node = re.match(r"\d+", env.get("SLURM_TASKS_PER_NODE", str(world)))
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "127.0.0.1")
        # All tasks of a step must use the same port, and no other step. Ports from 32768 on are
        # ephemeral: the kernel may have given one to another process.
        port = 20000 + (_number(env, "SLURM_JOB_ID", "0", 0) + 101 * step) % 12000
        return Identity(
            rank=_number(env, "SLURM_PROCID", "", 0, world - 1),
            world=world,
            local_rank=_number(env, "SLURM_LOCALID", "0", 0, world - 1),
            local_world=int(per_node.group()) if per_node else 1,
            address=env.get("MASTER_ADDR", first_host(nodes)),
            port=_number(env, "MASTER_PORT", str(port), 0, 65535),
        )
    return None


def _number(
    env: Mapping[str, str], name: str, default: str, low: int, high: int | None = None
) -> int:
    """A variable that torchrun or srun has set. Raises `ConfigError` unless it is in the range."""
    text = env.get(name, default)
    good = text.isdecimal() and low <= int(text) and (high is None or int(text) <= high)
    most = f"{low} or more" if high is None else f"from {low} to {high}"
    hint = f"must be a whole number, {most}; torchrun and srun set it, so unset it without them"
    require(good, name, text, hint)
    return int(text)


def first_host(nodelist: str) -> str:
    """The first host of SLURM's compressed list: `gpu[03-07,12],cpu1` → `gpu03`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?", nodelist)
    return match.group(1) + (match.group(2) or "") if match else nodelist


def world_size(config: LaunchConfig) -> int:
    """The number of workers of a run: that of torchrun or srun, else `launch.workers`."""
    me = identity()
    return me.world if me else config.workers


def workers_here() -> int:
    """How many local workers a run has whose `launch.workers` is null."""
    return torch.cuda.device_count() or LaunchConfig.workers


def stop_signals() -> tuple[signal.Signals, ...]:
    """`forked.STOP_SIGNALS`, without SIGHUP under nohup, which has it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(n for n in forked.STOP_SIGNALS if n != signal.SIGHUP or not ignored)


def is_first() -> bool:
    """Whether this process prints for the run: it is worker 0, or it starts the workers."""
    try:
        me = identity()
    except ConfigError:  # whoever it is: nobody else may be there to say so
        return True
    return me is None or me.rank == 0


def refuse(error: ConfigError) -> int:
    """Print in one line, once, what cannot be run. Returns the exit status."""
    line = f"error: {error}"
    faults.note(line)
    if is_first():
        print(line, file=sys.stderr, flush=True)
    else:
        time.sleep(_PEER_S)  # the first to end has the others killed, who must have spoken by then
    return REFUSED


def check(config: Config) -> None:
    """Refuse what this machine cannot run, before any worker is started.

    What a GPU cannot do shows in its worker (`mesh`): to ask it takes a context, which is memory of
    the GPU that this process would hold for as long as it lives.

    Raises:
        ConfigError: an elastic run, or one of several machines, has fewer GPUs than workers, unless
            at scale=smoke, whose models a CPU trains as well; nccl together with comm.device=cpu;
            the CPU has no bf16; too few open files are allowed; it cannot reach itself.
    """
    local = local_workers(config)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # With fewer, as without a loopback interface, PyTorch's launcher would wait for ever.
    hint = f"must be {_FILES} open files or more: ulimit -n 65536"
    require(files >= _FILES or files == resource.RLIM_INFINITY, "ulimit -n", files, hint)
    if identity() is None and config.launch.workers > 1:
        try:
            with socket.create_server(("127.0.0.1", 0)) as here:
                socket.create_connection(here.getsockname()).close()
        except OSError as error:
            hint = f"{error.strerror}; workers of this machine meet there: ip link set lo up"
            raise ConfigError("network", "127.0.0.1", hint) from None
    if config.launch.backend == "nccl":
        hint = "with comm.device=cpu gloo carries everything; use auto"
        require(config.comm.device is CommDevice.auto, "launch.backend", "nccl", hint)
        count = torch.cuda.device_count() if dist.is_nccl_available() else 0
        require(count >= local, "launch.backend", "nccl", f"{local} GPUs needed, {count} here")
    elif config.scale != "smoke":
        require(not _crowded(config), "launch.workers", local, _crowded(config))
    if first_device(config).type == "cpu":
        _check_precision(config, "cpu")


def local_workers(config: Config) -> int:
    """How many workers of a run are on this machine."""
    me = identity()
    return me.local_world if me else config.launch.workers


def workers_on_a_gpu(config: Config) -> int:
    """How many workers of a run share a GPU of this machine at most."""
    return -(-local_workers(config) // max(1, torch.cuda.device_count()))


def _fewer_gpus(config: Config) -> bool:
    """Whether this machine has GPUs, but fewer than workers, and no key says what to do then."""
    auto = config.launch.backend == "auto" and config.comm.device is CommDevice.auto
    return auto and 0 < torch.cuda.device_count() < local_workers(config)


def _can_share(config: Config) -> bool:
    """Whether workers may share GPUs under nccl. Its sockets then reach this machine only, and an
    elastic run would have to abort them."""
    me = identity()
    return not config.launch.elastic and (me is None or me.world == me.local_world)


def _crowded(config: Config) -> str:
    """What to do where this machine has fewer GPUs than workers, which cannot share them; "" where
    it has not."""
    if not _fewer_gpus(config) or _can_share(config):
        return ""
    count = torch.cuda.device_count()
    return (
        f"{local_workers(config)} GPUs needed, {count} here; use {count}, or comm.device=cpu for "
        "workers that share a GPU, or launch.backend=gloo for the CPU"
    )


def _where(config: Config) -> str:
    """Where the workers train that have no GPU each; "" where that goes without saying."""
    workers, count = f"launch.workers={config.launch.workers}", torch.cuda.device_count()
    if crowded := _crowded(config):
        return f"{workers}: training on the CPU; {crowded}"
    if not _fewer_gpus(config):
        return ""
    shared = "one GPU" if count == 1 else f"{count} GPUs"
    return (
        f"{workers}: sharing {shared}, through NCCL's sockets; comm.device=cpu goes through gloo "
        "and the host's memory"
    )


def _check_precision(config: Config, device: str) -> None:
    if config.train.precision is Precision.bf16:
        hint = "this device has no bf16; use fp32"
        require(bf16_supported(device), "train.precision", "bf16", hint)


def bf16_supported(device: str) -> bool:
    """Whether bf16 autocast runs on this kind of device here."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.amp.is_autocast_available(device)


def run(worker: Worker, config: Config) -> int:
    """Run `worker(config)` in every worker, in a process group. Returns the exit status.

    `worker` is pickled. Raises `ConfigError` where this machine has no place for its sockets.
    """
    forked.place_sockets()  # those of loading processes, too
    me = identity()
    if me is not None:
        return _as_worker(worker, config, me)
    if line := _where(config):
        print(line, file=sys.stderr, flush=True)
    if config.launch.elastic:
        with _forwarded(stop_signals()) as orders:
            size = config.mesh.replica_size
            return launcher.launch(partial(_guarded, worker, config), config.launch, size, orders)
    if config.launch.workers == 1:
        return _guarded(worker, config, 0)
    return _spawn(worker, config)


def placement(config: Config, local_rank: int, local_world: int) -> tuple[torch.device, str]:
    """The device of a local worker's weights and batches, and its process group's backend."""
    backend, count = config.launch.backend, torch.cuda.device_count()
    if config.comm.device is CommDevice.cpu:
        if backend == "auto" and count > 0:
            return torch.device("cuda", local_rank % count), "gloo"
    elif backend == "nccl":
        return torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
    elif backend == "auto" and count > 0 and (local_world <= count or _can_share(config)):
        return torch.device("cuda", local_rank % count), "cpu:gloo,cuda:nccl"
    return torch.device("cpu"), "gloo"


def first_device(config: Config) -> torch.device:
    """Where the first local worker trains; the others train on a device of the same kind."""
    return placement(config, 0, local_workers(config))[0]


def mesh(config: Config) -> Mesh:
    """The mesh of a worker that `run` has started, whose GPU becomes the current one. Raises
    `ConfigError` for a GPU that has no bf16 where it is needed."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device, backend = placement(config, local, local_world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if "nccl" in backend and local_world > torch.cuda.device_count():
            gpus.share()
        _check_precision(config, "cuda")
        torch.set_float32_matmul_precision("high")  # what stays fp32 is multiplied in TF32
    replicas = launcher.replicas(device, backend)
    return Mesh.world(config.mesh.replica_size, device) if replicas is None else replicas.mesh


def _as_worker(worker: Worker, config: Config, me: Identity) -> int:
    os.environ.update(
        RANK=str(me.rank),
        WORLD_SIZE=str(me.world),
        LOCAL_RANK=str(me.local_rank),
        LOCAL_WORLD_SIZE=str(me.local_world),
        MASTER_ADDR=me.address,
        MASTER_PORT=str(me.port),
    )
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // me.local_world))
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
    device, backend = placement(config, me.local_rank, me.local_world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with _waiting_for_others(me):
        store, rank, world = next(rendezvous("env://"))
        # When torchrun starts the workers again its store may still have the addresses that they
        # had before, as with torch 2.15; so each attempt has keys of its own.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt/{attempt}", store)
        faults.share(store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    try:
        yield
    finally:
        faults.share(None)
        dist.destroy_process_group()
        # What the run has left in cycles keeps gloo's threads. One that lets go of a tensor while
        # the interpreter ends takes the process with it.
        gc.collect()


def _told(error: Exception, rank: int) -> bool:
    """Whether the machine has ended this worker, of which a line has told."""
    line = from_outside(error, f"worker {rank}")
    if line is not None:
        faults.tell(f"error: {line}", from_outside(error) or "")
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
        faults.tell(f"error: {error}")
        return 1
    except ConfigError as error:
        # One that shows only in training, such as a damaged file, and perhaps on this worker only.
        faults.tell(f"error: {error}")
        return REFUSED
    except Exception as error:
        if config.launch.elastic and not (
            isinstance(error, OSError) and error.errno in program.NO_ROOM
        ):
            raise
        if _told(error, rank):
            return REFUSED
        if not (isinstance(error, WorkerLost) or is_loss(error)):
            if faults.is_first(f"{type(error).__name__}: {error}"):
                raise
            return 1
        time.sleep(_PEER_S)
        if not faults.are_told():  # whoever is gone was killed
            why = f": {error}" if isinstance(error, WorkerLost) else ""
            faults.tell(f"error: worker {rank} has lost another worker{why}", "a lost worker")
        # Groups do not end before what is under way on them, which may wait for the lost one, and
        # others wait for connections that this process holds.
        exit_at_once(1)
    return 0


def _local_worker(worker: Worker, config: Config) -> None:
    me = identity()
    assert me is not None, "the elastic launcher sets RANK"
    forked.end_with_starter()
    try:
        status = _as_worker(worker, config, me)
    except Exception:  # a bug: its place is printed here, because the launcher is silenced
        traceback.print_exc()
        status = 1
    if status:
        exit_at_once(status)  # the launcher takes a plain exit for a failure of its own


def _spawn(worker: Worker, config: Config) -> int:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
    from torch.distributed.launcher.api import elastic_launch

    # The workers decide when a step is finished, so signals are handed on to them. The launcher
    # would kill them after 30 s, so it handles none of these signals.
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with _forwarded(stop_signals()):
        elastic = ElasticConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=config.launch.workers,
            run_id="local",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.2,
            start_method=forked.context().get_start_method(),
            signals_to_handle="SIGQUIT",
        )
        try:
            elastic_launch(elastic, _local_worker)(worker, config)
        except (ConnectionError, EOFError):
            return _without_fork_server()
        except ChildFailedError as error:
            _, first = error.get_first_failure()
            if forked.server_lost(first.pid, first.exitcode):
                return _without_fork_server()
            return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    return 0


def _without_fork_server() -> int:
    """Say that it is gone. Returns the exit status."""
    print(f"error: {forked.SERVER_LOST}", file=sys.stderr, flush=True)
    return PREEMPTED


@contextlib.contextmanager
def _forwarded(signals: tuple[signal.Signals, ...]) -> Iterator[launcher.Orders]:
    """Inside, these signals are handed on to the workers. A second Ctrl-C kills the workers.

    The signals are blocked in this process, and so in the workers that it starts, which look for
    them when they train (StopVote). A signal that comes before that waits, and is not lost. They
    are not blocked in threads that libraries have started, such as those of NumPy's BLAS; where the
    system gives a signal to one of these, Python's handler sees it.
    """
    received: list[int] = []
    handlers = {n: signal.signal(n, lambda number, _: received.append(number)) for n in signals}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    # Python's resource tracker must start with them blocked, too; starting it unblocks some here.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    done, orders = threading.Event(), launcher.Orders()

    def forward() -> None:
        reached: set[tuple[int, int]] = set()
        while not done.wait(0.1):
            # Not sigtimedwait: stopping and going on (Ctrl-Z, fg) ends it with an arbitrary number.
            if signal.sigpending() & set(signals):
                received.append(signal.sigwait(signals))
            if not received:
                continue
            number = signal.SIGKILL if received.count(signal.SIGINT) > 1 else received[-1]
            orders.stop.set()
            if number == signal.SIGKILL:
                orders.kill.set()
            # Not active_children(): it would take the status of one that has ended from the thread
            # that waits for it, which would find 255.
            for child in list(multiprocessing.process._children):  # type: ignore[attr-defined]
                with contextlib.suppress(ProcessLookupError, ValueError):  # closed meanwhile
                    if (child.pid, number) not in reached and not wait([child.sentinel], 0):
                        reached.add((child.pid, number))
                        os.kill(child.pid, number)

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    try:
        yield orders
    finally:
        done.set()
        thread.join()
        for n, handler in handlers.items():
            signal.signal(n, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
