"""AllReduce: gradients are averaged at every step, overlapped with backward.

PyTorch's own DistributedDataParallel, unmodified, so that the baseline is the one people use: over
all workers, whatever the size of a replica. Parameters that fully_shard has cut over a replica's
workers and repeats over the replicas (its hybrid mode) are averaged by it already.
Buffers are treated as in every other method: local while training, averaged in the consensus
(DDP's default would send replica 0's before every forward pass).
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from co2.comm.collectives import consensus, data_parallel, local, replicate
from co2.comm.mesh import Mesh
from co2.config import CommConfig, CommDevice, Precision
from co2.errors import require


class AllReduce:
    averages_gradients = True
    refused_strategies: Mapping[str, str] = MappingProxyType({})

    @dataclass
    class Config:
        """DDP has no hyper-parameters of its own."""

    lr_at: Callable[[int], float] | None = None

    def __init__(self, config: Any = None, comm: CommConfig | None = None) -> None:
        self.config = config or self.Config()
        self.comm = comm or CommConfig()
        hint = (
            "allreduce keeps no copies of the model, and DDP averages where gradients are; use auto"
        )
        require(self.comm.device is CommDevice.auto, "comm.device", self.comm.device.name, hint)
        self.steps = 0
        self._before = {"comm_s": 0.0, "exposed_s": 0.0, "steps": 0}

    def prepare(self, model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> nn.Module:
        self.model, self.optimizer, self.mesh = model, optimizer, mesh
        self.group, self.replica_group = (
            mesh.new_group_across_replicas(),
            mesh.new_group_within_replica(),
        )
        replicate(model, self.group)
        self.ddp: DistributedDataParallel | None = None
        self.sharded = any(local(p) is not p for p in model.parameters())
        if mesh.num_workers == 1 or self.sharded:
            return model
        self.ddp = data_parallel(model, self.comm.bucket_mb)
        if self.comm.dtype is Precision.bf16:
            self.ddp.register_comm_hook(None, bf16_compress_hook)
        if mesh.device.type == "cpu":
            self.ddp._set_ddp_runtime_logging_sample_rate(1)  # on a GPU each sample would wait
        return self.ddp

    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1

    def consensus(self) -> AbstractContextManager[None]:
        return consensus(self.model, self.group, self.replica_group)

    def flush(self) -> None:
        """Nothing is in flight after a backward pass."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "clocks": self._clocks()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self._before = {**state["clocks"], "steps": self.steps}

    def stats(self) -> dict[str, float]:
        return {**self._clocks(), "bytes": float(self.bytes_per_step() * self.steps)}

    def notices(self) -> list[str]:
        return []

    @property
    def scratch_bytes(self) -> int:
        return 0

    @property
    def copies(self) -> float:
        """Gradients live in DDP's buckets; for bf16 it makes rounded ones beside them."""
        return 0.0 if self.ddp is None or self.comm.dtype is Precision.fp32 else 0.5

    @property
    def state_device(self) -> torch.device:
        return self.mesh.device

    @property
    def lag(self) -> int:
        return 1

    def bytes_per_step(self) -> int:
        """Bytes that one worker sends in one step: 2(G−1)/G of its gradients, where G counts the
        workers under DDP, and the replicas where parameters are sharded."""
        trained = [local(p.detach()) for p in self.model.parameters() if p.requires_grad]
        halved = self.comm.dtype is Precision.bf16
        payload = sum(p.numel() * (2 if halved else p.element_size()) for p in trained)
        rings = self.mesh.num_replicas if self.sharded else self.mesh.num_workers
        return 2 * (rings - 1) * payload // rings

    def _clocks(self) -> dict[str, float]:
        """DDP's own averages over the steps it sampled, times all steps.

        comm_s: first bucket's launch to the last one's completion; exposed_s: what of it came
        after the last gradient was computed. fully_shard keeps no clocks: not a number.
        """
        if self.sharded:
            return {"comm_s": math.nan, "exposed_s": math.nan}
        comm_s, exposed_s = self._before["comm_s"], self._before["exposed_s"]
        if self.ddp is not None:
            sampled = self.ddp._get_ddp_logging_data()
            comm = sampled.get("avg_backward_comm_time", 0) / 1e9
            hidden = sampled.get("avg_backward_compute_comm_overlap_time", 0) / 1e9
            steps = self.steps - self._before["steps"]
            comm_s += comm * steps
            exposed_s += max(0.0, comm - hidden) * steps
        return {"comm_s": comm_s, "exposed_s": exposed_s}
