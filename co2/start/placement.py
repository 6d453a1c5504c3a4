"""Where the workers of a run train, what carries their collectives, and what cannot run here."""

import resource
import socket

import torch
import torch.distributed as dist

from co2.config import CommDevice, Config, LaunchConfig, Precision
from co2.errors import ConfigError, require
from co2.start.identity import identity

_FILES, _FILES_A_WORKER = 64, 4
"""Open files that a process of a run has, and how many more for each worker: a worker is connected
to all others once for PyTorch's default group, the method's and each of its means'; who starts
workers holds their ends of the store and of pipes."""


def workers_here() -> int:
    """How many local workers a run has whose `launch.workers` is null."""
    return torch.cuda.device_count() or LaunchConfig.workers


def check(config: Config) -> None:
    """Refuse what this machine cannot run, before any worker is started.

    What a GPU cannot do shows in its worker (`launch.mesh`): to ask it takes a context, which is
    memory of the GPU that this process would hold for as long as it lives.

    Raises:
        ConfigError: an elastic run, or one of several machines, has fewer GPUs than workers, unless
            at scale=smoke, whose models a CPU trains as well; nccl together with comm.device=cpu;
            the CPU has no bf16; too few open files are allowed; it cannot reach itself.
    """
    local = local_workers(config)
    me = identity()
    world = me.world if me else config.launch.workers
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # as many as `allow_files` allows
    needed = _FILES + _FILES_A_WORKER * world
    # With fewer, as without a loopback interface, PyTorch's launcher would wait for ever.
    hint = f"{world} workers need {needed} open files: ulimit -n 65536"
    require(files >= needed or files == resource.RLIM_INFINITY, "ulimit -n", files, hint)
    if me is None and config.launch.workers > 1:
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
        check_precision(config, "cpu")


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


def unusual(config: Config) -> str:
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


def check_precision(config: Config, device: str) -> None:
    """Raise `ConfigError` where this kind of device lacks the precision."""
    if config.train.precision is Precision.bf16:
        hint = "this device has no bf16; use fp32"
        require(bf16_supported(device), "train.precision", "bf16", hint)


def bf16_supported(device: str) -> bool:
    """Whether bf16 autocast runs on this kind of device here."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.amp.is_autocast_available(device)


def place_of(config: Config, local_rank: int, local_world: int) -> tuple[torch.device, str]:
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
    return place_of(config, 0, local_workers(config))[0]
