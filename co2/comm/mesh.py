"""Mesh: who the replicas are, and the process groups between them."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

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
    rank_in_replica: int = 0
    """This worker's place in its replica."""
    replica_size: int = 1
    """Workers that share one replica."""

    @property
    def worker(self) -> int:
        """This worker's place among all."""
        return self.replica * self.replica_size + self.rank_in_replica

    @property
    def num_workers(self) -> int:
        return self.num_replicas * self.replica_size

    @classmethod
    def world(cls, replica_size: int = 1, device: torch.device | str | None = None) -> "Mesh":
        """All workers of the default process group.

        Args:
            replica_size: workers that share one replica, and average its gradients at every step
                by a means of their own: DistributedDataParallel or fully_shard over
                `new_group_within_replica()`. replica.py has it for train.py.
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
        replica, rank_in_replica = divmod(rank, replica_size)
        return cls(
            replica, size // replica_size, torch.device(device), rank_in_replica, replica_size
        )

    def new_group_across_replicas(self, backend: str | None = None) -> dist.ProcessGroup | None:
        """A process group of its own of this worker's counterparts, which hold the same part of
        every replica; None for a single replica.

        Collectives of different groups do not wait for each other. Every worker must make its
        groups in the same order.
        """
        size = self.replica_size
        parts = [range(shard, self.num_workers, size) for shard in range(size)]
        return _own(parts, self.rank_in_replica, backend) if self.num_replicas > 1 else None

    def new_group_within_replica(self, backend: str | None = None) -> dist.ProcessGroup | None:
        """The same of the workers of this replica; None where a worker is a whole one."""
        size = self.replica_size
        parts = [range(first, first + size) for first in range(0, self.num_workers, size)]
        return _own(parts, self.replica, backend) if size > 1 else None

    def new_group_of_workers(self, backend: str | None = None) -> dist.ProcessGroup | None:
        """The same of all workers; None for one alone."""
        workers = self.num_workers
        return _own([range(workers)], 0, backend) if workers > 1 else None


def check_replica_size(replica_size: int, workers: int) -> None:
    """Raise `ConfigError` unless the workers can be divided into replicas of this size."""
    require_count("mesh.replica_size", replica_size)
    hint = f"must divide the {workers} workers"
    require(workers % replica_size == 0, "mesh.replica_size", replica_size, hint)


def _own(
    parts: Sequence[Iterable[int]], mine: int, backend: str | None
) -> dist.ProcessGroup | None:
    """Make the groups of all parts, as every worker must; return that of one."""
    groups = [dist.new_group(list(ranks), backend=backend) for ranks in parts]
    group = groups[mine]
    assert isinstance(group, dist.ProcessGroup), "this worker is a member"
    return group
