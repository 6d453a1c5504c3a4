"""Who the replicas are, and the blocking collectives that are not part of any method."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from co2.errors import require


@dataclass(frozen=True)
class Mesh:
    """This worker's place among the replicas. Without a process group: one replica, alone."""

    replica: int
    num_replicas: int
    device: torch.device

    @classmethod
    def world(cls, replica_size: int = 1, device: torch.device | str | None = None) -> "Mesh":
        """All workers of the default process group, every one a replica.

        Args:
            replica_size: workers that share one replica. Only 1 so far.
            device: of the batches; default: the current GPU under NCCL, or when alone with one.
                Under gloo name it to train on a GPU, with comm.device=cpu.
        Raises:
            ConfigError: replica_size other than 1.
            RuntimeError: several workers were started but no process group was initialised.
        """
        require(replica_size == 1, "mesh.replica_size", replica_size, "only 1 is implemented")
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
        return cls(replica=rank, num_replicas=size, device=torch.device(device))

    def new_group(self, backend: str | None = None) -> dist.ProcessGroup | None:
        """A process group of all replicas of its own; None for a single replica.

        Collectives of different groups do not wait for each other. Every worker must make its
        groups in the same order.
        """
        if self.num_replicas == 1:
            return None
        group = dist.new_group(backend=backend)
        assert isinstance(group, dist.ProcessGroup), "every worker is a member"
        return group


def carries(group: dist.ProcessGroup | None, tensor: Tensor) -> bool:
    """Whether a group takes a tensor where it lies: gloo is for the host's memory."""
    return group is None or not tensor.is_cuda or "nccl" in dist.get_backend_config(group)


def replicate(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Give every replica the parameters and buffers of replica 0."""
    if group is not None:
        for tensor in _states(model):
            _apply(tensor, group, lambda t: dist.broadcast(t, src=0, group=group))


def averageable(model: nn.Module) -> list[Tensor]:
    """What a consensus is made of: trainable parameters and floating-point buffers."""
    trainable = [p.detach() for p in model.parameters() if p.requires_grad]
    return trainable + [b.detach() for b in model.buffers() if b.is_floating_point()]


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


def _states(model: nn.Module) -> list[Tensor]:
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]


def _apply(tensor: Tensor, group: dist.ProcessGroup, collective: Callable[[Tensor], Any]) -> None:
    """Collectives take contiguous tensors, where the group can reach them; channels-last weights
    are not contiguous."""
    dense = tensor.contiguous()
    if not carries(group, dense):
        dense = dense.cpu()
    collective(dense)
    if dense.device != tensor.device or dense.data_ptr() != tensor.data_ptr():
        tensor.copy_(dense)
