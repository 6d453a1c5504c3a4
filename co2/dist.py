"""Who the replicas are, and the blocking collectives that are not part of any method."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from co2.errors import require, require_count


@dataclass(frozen=True)
class Mesh:
    """This worker's place: replicas × workers of a replica. Without a process group: alone.

    Workers of a replica have adjacent ranks. The methods need to know of the replicas only;
    batches, seeds and files are a worker's own.
    """

    replica: int
    num_replicas: int
    device: torch.device
    shard: int = 0
    """This worker's place in its replica."""
    replica_size: int = 1
    """Workers that share one replica."""

    @property
    def worker(self) -> int:
        """This worker's place among all."""
        return self.replica * self.replica_size + self.shard

    @property
    def num_workers(self) -> int:
        return self.num_replicas * self.replica_size

    @classmethod
    def world(cls, replica_size: int = 1, device: torch.device | str | None = None) -> "Mesh":
        """All workers of the default process group.

        Args:
            replica_size: workers that share one replica, and average its gradients at every step
                by a means of their own: DistributedDataParallel or fully_shard over
                `new_shard_group()`. sharding.py has it for train.py.
            device: of the batches; default: the current GPU under NCCL, or when alone with one.
                Under gloo name it to train on a GPU, with comm.device=cpu.
        Raises:
            ConfigError: the workers cannot be divided into replicas of this size.
            RuntimeError: several workers were started but no process group was initialised.
        """
        ready = dist.is_available() and dist.is_initialized()
        if not ready and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RuntimeError(
                "WORLD_SIZE is above 1 but there is no process group: "
                "call torch.distributed.init_process_group() before Mesh.world()"
            )
        if device is None:
            gpu = dist.get_backend() == "nccl" if ready else torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if gpu else "cpu"
        rank, size = (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)
        check_replica_size(replica_size, size)
        replica, shard = divmod(rank, replica_size)
        return cls(replica, size // replica_size, torch.device(device), shard, replica_size)

    def new_group(self, backend: str | None = None) -> dist.ProcessGroup | None:
        """A process group of its own of this worker's counterparts, which hold the same part of
        every replica; None for a single replica.

        Collectives of different groups do not wait for each other. Every worker must make its
        groups in the same order.
        """
        size = self.replica_size
        parts = [range(shard, self.num_workers, size) for shard in range(size)]
        return _own(parts, self.shard, backend) if self.num_replicas > 1 else None

    def new_shard_group(self, backend: str | None = None) -> dist.ProcessGroup | None:
        """The same of the workers of this replica; None where a worker is a whole one."""
        size = self.replica_size
        parts = [range(first, first + size) for first in range(0, self.num_workers, size)]
        return _own(parts, self.replica, backend) if size > 1 else None

    def new_worker_group(self, backend: str | None = None) -> dist.ProcessGroup | None:
        """The same of all workers; None for one alone."""
        workers = self.num_workers
        return _own([range(workers)], 0, backend) if workers > 1 else None


def check_replica_size(replica_size: int, workers: int) -> None:
    """Raise `ConfigError` unless the workers can be divided into replicas of this size."""
    require_count("mesh.replica_size", replica_size)
    mend = f"must divide the {workers} workers"
    require(workers % replica_size == 0, "mesh.replica_size", replica_size, mend)


def local(tensor: Tensor) -> Tensor:
    """What this worker holds of a tensor: its part of a DTensor, which `fully_shard` makes of a
    parameter and which may be empty; of others the tensor itself."""
    part = getattr(tensor, "to_local", None)  # to import DTensor costs half a second
    return tensor if part is None else part()


def carries(group: dist.ProcessGroup | None, tensor: Tensor) -> bool:
    """Whether a group takes a tensor where it lies: gloo is for the host's memory."""
    return group is None or not tensor.is_cuda or "nccl" in dist.get_backend_config(group)


def replicate(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Give every replica the parameters and buffers of replica 0; of the workers of a group, those
    of the first."""
    if group is not None:
        for tensor in (*model.parameters(), *model.buffers()):
            part = local(tensor.detach())
            _apply(part, group, lambda t: dist.broadcast(t, group_src=0, group=group))


def data_parallel(
    model: nn.Module, bucket_mb: float, group: dist.ProcessGroup | None = None
) -> DistributedDataParallel:
    """PyTorch's own averaging of gradients, over all workers or those of a group; every worker
    keeps its own buffers."""
    with warnings.catch_warnings():
        # torch renames broadcast_buffers; the old name is the one that 2.11 knows too.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            model,
            process_group=group,
            broadcast_buffers=False,
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,
        )


@contextmanager
def consensus(
    model: nn.Module, group: dist.ProcessGroup | None, shard_group: dist.ProcessGroup | None
) -> Iterator[None]:
    """Inside: the model holds its mean over the replicas, trainable parameters and floating-point
    buffers. After: restored bit for bit.

    Args:
        model: the module that was prepared, without wrapping.
        group: of the counterparts.
        shard_group: of the replica. Each of its workers has buffers of its own, and their mean is
            taken as well.
    """
    weights = [local(p.detach()) for p in model.parameters() if p.requires_grad]
    buffers = [b.detach() for b in model.buffers() if b.is_floating_point()]
    try:
        with averaged([*weights, *buffers], group), averaged(buffers, shard_group):
            _forget_gathered(model)
            yield
    finally:
        _forget_gathered(model)


@contextmanager
def averaged(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> Iterator[None]:
    """Inside: the tensors hold their means over the replicas. After: restored bit for bit.

    Blocking, and all replicas must enter together. Holds one copy of the tensors meanwhile.
    """
    saved = [tensor.clone() for tensor in tensors]
    try:
        if group is not None:
            for tensor in tensors:
                _apply(
                    tensor, group, lambda t: dist.all_reduce(t, op=dist.ReduceOp.AVG, group=group)
                )
        yield
    finally:
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)


def _forget_gathered(model: nn.Module) -> None:
    """fully_shard keeps what a forward pass has gathered for the backward pass, which after an
    evaluation does not come; the local shards have changed since."""
    for module in model.modules():
        reshard = getattr(module, "reshard", None)
        if reshard is not None:
            reshard()


def _own(
    parts: Sequence[Iterable[int]], mine: int, backend: str | None
) -> dist.ProcessGroup | None:
    """Make the groups of all parts, as every worker must; return that of one."""
    groups = [dist.new_group(list(ranks), backend=backend) for ranks in parts]
    group = groups[mine]
    assert isinstance(group, dist.ProcessGroup), "this worker is a member"
    return group


def _apply(tensor: Tensor, group: dist.ProcessGroup, collective: Callable[[Tensor], Any]) -> None:
    """Collectives take contiguous tensors, where the group can reach them; channels-last weights
    are not contiguous."""
    if tensor.numel() == 0:  # so is every counterpart's
        return
    dense = tensor.contiguous()
    if not carries(group, dense):
        dense = dense.cpu()
    collective(dense)
    if dense.device != tensor.device or dense.data_ptr() != tensor.data_ptr():
        tensor.copy_(dense)
