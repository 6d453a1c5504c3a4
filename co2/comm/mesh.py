"""Mesh: the workers, how they form replicas, and the process groups between them."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from co2.errors import require, require_count


class Elastic(Protocol):
    """What a mesh needs of replicas that come and go (co2/elastic/replicas.py)."""

    @property
    def newcomer(self) -> bool:
        """Whether this worker has come to others who train already."""

    @property
    def generation(self) -> int:
        """How many times the replicas have changed."""

    def new_group(self, ranks: Sequence[int], backend: str | None) -> dist.ProcessGroup:
        """Make a process group that ends when one of its workers is lost."""

    def on_change(self, regroup: Callable[["Mesh"], None]) -> None:
        """See `Mesh.on_change`."""

    def new_mean(self, *arguments: Any, **more: Any) -> object:
        """Make a `BackgroundMean` of these arguments that recovers where a replica is lost."""


@dataclass(frozen=True)
class Mesh:
    """This worker's place among `num_replicas` × `replica_size` workers.

    The workers of a replica have adjacent ranks.
    """

    replica: int
    """Index of this worker's replica."""
    num_replicas: int
    device: torch.device
    """Where this worker's batches lie."""
    rank_in_replica: int = 0
    """Index of this worker in its replica."""
    replica_size: int = 1
    """How many workers share one replica."""
    elastic: Elastic | None = field(default=None, compare=False)
    """Renews the mesh as replicas come and go; None where the replicas are fixed."""
    stretches: tuple[tuple[int, int], ...] = ()
    """Where workers have come or gone: from which micro-batch on how many of them drew samples.
    Empty: as many as now, from the first one on."""

    @property
    def worker(self) -> int:
        """Index of this worker among all workers."""
        return self.replica * self.replica_size + self.rank_in_replica

    @property
    def newcomer(self) -> bool:
        """Whether this worker has come to others who train already."""
        return self.elastic is not None and self.elastic.newcomer

    def on_change(self, regroup: Callable[["Mesh"], None]) -> None:
        """Have `regroup` called with the new mesh whenever replicas have come or gone. It makes all
        process groups anew that the caller has made with this one, in the same order."""
        if self.elastic is not None:
            self.elastic.on_change(regroup)

    @property
    def num_workers(self) -> int:
        return self.num_replicas * self.replica_size

    @classmethod
    def world(cls, replica_size: int = 1, device: torch.device | str | None = None) -> "Mesh":
        """Return the mesh of all workers of the default process group; without one, of a single
        worker.

        Args:
            replica_size: how many workers share one replica. They must average its gradients at
                every step themselves, by DistributedDataParallel or fully_shard over
                `new_group_within_replica()`; co2/train/within_replica.py does it for train.py.
            device: where the batches lie. None: the current GPU, if there is one and the process
                group, if any, does not use gloo for it; else the CPU. To train on a GPU under gloo,
                name it here and set comm.device=cpu.
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
            reached = not ready or serves_gpus(dist.get_backend_config())
            gpu = reached and torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if gpu else "cpu"
        rank, size = (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)
        check_replica_size(replica_size, size)
        replica, rank_in_replica = divmod(rank, replica_size)
        return cls(
            replica, size // replica_size, torch.device(device), rank_in_replica, replica_size
        )

    def new_group_across_replicas(
        self, backend: str | None = None, max_ctas: int | None = None
    ) -> dist.ProcessGroup | None:
        """Make a process group of this worker and its counterparts, which hold the same shard of
        the other replicas; None for a single replica.

        Collectives of different groups do not wait for each other. All workers must make their
        groups in the same order.

        Args:
            max_ctas: see `CommConfig`; of a group of NCCL's alone.
        """
        ranks = range(self.rank_in_replica, self.num_workers, self.replica_size)
        return self._group(ranks, backend, max_ctas if backend == "nccl" else None)

    def new_group_within_replica(self, backend: str | None = None) -> dist.ProcessGroup | None:
        """Make a process group of this replica's workers; None if it has only one."""
        if self.replica_size == 1:
            return None
        # Where replicas come and go, PyTorch's default group is this replica alone.
        first = self.replica * self.replica_size if self.elastic is None else 0
        return _new_group(range(first, first + self.replica_size), backend)

    def new_group_of_workers(self, backend: str | None = None) -> dist.ProcessGroup | None:
        """Make a process group of all workers; None if there is only one."""
        return self._group(range(self.num_workers), backend)

    def control_group(self) -> dist.ProcessGroup | None:
        """A group of all workers for what they say to each other, in the host's memory; None if
        there is only one. PyTorch's default group serves for it where it reaches that memory and
        all workers, so that no worker holds a connection more to each of the others."""
        if self.elastic is None and self.num_workers > 1 and backend_of("cpu") == "gloo":
            return dist.group.WORLD
        return self.new_group_of_workers("gloo")

    def _group(
        self, ranks: Sequence[int], backend: str | None, max_ctas: int | None = None
    ) -> dist.ProcessGroup | None:
        """Make a process group of these ranks, in which only they take part. None for one rank."""
        if len(ranks) == 1:
            return None
        if self.elastic is not None:
            return self.elastic.new_group(ranks, backend)
        return _new_group(ranks, backend, max_ctas)


def _new_group(
    ranks: Sequence[int], backend: str | None, max_ctas: int | None = None
) -> dist.ProcessGroup:
    options = None
    if max_ctas is not None:
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = max_ctas
    group = dist.new_group(
        list(ranks), backend=backend, pg_options=options, use_local_synchronization=True
    )
    assert isinstance(group, dist.ProcessGroup), "this worker is a member"
    return group


def check_replica_size(replica_size: int, workers: int) -> None:
    """Raise `ConfigError` unless the workers can be divided into replicas of this size."""
    require_count("mesh.replica_size", replica_size)
    hint = f"must divide the {workers} workers"
    require(workers % replica_size == 0, "mesh.replica_size", replica_size, hint)


def backend_of(kind: str) -> str | None:
    """The backend that carries tensors of this kind of device ("cpu", "cuda"), and no other: that
    of the default process group, or gloo for the host's memory where it has none. A group of two
    backends would hold a connection of gloo to each worker beside those of NCCL. None: there is no
    process group, or the device is another, such as "meta"."""
    if kind not in ("cpu", "cuda") or not (dist.is_available() and dist.is_initialized()):
        return None
    return _backends(dist.get_backend_config()).get(kind, "gloo")


def serves_gpus(config: str) -> bool:
    """Whether a process group's collectives reach the memory of GPUs.

    Args:
        config: its backend for each kind of device, as `get_backend_config` tells it, such as
            cpu:gloo,cuda:nccl. gloo may stand there for GPUs too, but lacks most collectives then.
    """
    return _backends(config).get("cuda", "gloo") != "gloo"


def _backends(config: str) -> dict[str, str]:
    return dict(pair.split(":") for pair in config.split(","))
