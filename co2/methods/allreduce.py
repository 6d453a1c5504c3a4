"""AllReduce: gradients are averaged at every step, overlapped with backward.

This is PyTorch's own DistributedDataParallel (DDP), unmodified, so that the baseline is the one
that people use. It averages over all workers, whatever the size of a replica. If fully_shard has
sharded the parameters over a replica's workers, it also averages their gradients over the replicas
(its hybrid mode), and DDP is not needed.
Buffers are treated as in every other method: they are local during training and averaged in the
consensus. DDP's default would send those of replica 0 before every forward pass.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from co2.comm.clocks import CommTotals
from co2.comm.collectives import data_parallel, local
from co2.config import CommConfig, CommDevice, Precision, Waits
from co2.errors import require
from co2.methods.base import Method, MethodStats


class AllReduce(Method):
    waits = Waits.always
    averages_gradients = True

    @dataclass
    class Config:
        """DDP has no hyper-parameters of its own."""

    def __init__(self, config: Any = None, comm: CommConfig | None = None) -> None:
        super().__init__(config, comm)
        hint = (
            "allreduce keeps no copies of the model, and DDP averages where gradients are; use auto"
        )
        require(self.comm.device is CommDevice.auto, "comm.device", self.comm.device.name, hint)
        self._before = CommTotals()
        """What the segments before this one have cost, if the run was resumed."""
        self._steps_before = 0

    def set_up(self) -> nn.Module:
        self.ddp: DistributedDataParallel | None = None
        self.sharded = any(local(p) is not p for p in self.model.parameters())
        if self.mesh.num_workers == 1 or self.sharded:
            return self.model
        self.ddp = data_parallel(self.model, self.comm.bucket_mb)
        if self.comm.dtype is Precision.bf16:
            self.ddp.register_comm_hook(None, bf16_compress_hook)
        if self.mesh.device.type == "cpu":
            self.ddp._set_ddp_runtime_logging_sample_rate(1)  # on a GPU each sample would wait
        return self.ddp

    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        totals = self._totals()
        clocks = {"comm_s": totals.comm_s, "exposed_s": totals.exposed_s}
        return {**super().state_dict(), "clocks": clocks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._before, self._steps_before = CommTotals(**state["clocks"]), self.steps

    def stats(self) -> MethodStats:
        return MethodStats.of(self._totals())

    @property
    def extra_bytes(self) -> int:
        """DDP's buckets are the gradients, so they are no extra copy. For bf16 DDP makes rounded
        gradients beside them, half a copy, which cannot be named as tensors here."""
        rounded = self.ddp is not None and self.comm.dtype is Precision.bf16
        return self.copy_bytes // 2 if rounded else 0

    def bytes_per_step(self) -> int:
        """Return the bytes that one worker sends in one step: 2(G−1)/G of its gradients. G is the
        number of workers under DDP, and that of replicas if the parameters are sharded."""
        trained = [local(p.detach()) for p in self.model.parameters() if p.requires_grad]
        halved = self.comm.dtype is Precision.bf16
        payload = sum(p.numel() * (2 if halved else p.element_size()) for p in trained)
        rings = self.mesh.num_replicas if self.sharded else self.mesh.num_workers
        return 2 * (rings - 1) * payload // rings

    def _totals(self) -> CommTotals:
        """Return DDP's own averages over the steps that it has sampled, times the number of steps.

        comm_s is the time from the first bucket's launch to the last one's completion; exposed_s is
        the part of it after the last gradient was computed. fully_shard measures neither, so both
        are then not a number.
        """
        sent = float(self.bytes_per_step() * self.steps)
        if self.sharded:
            return CommTotals(math.nan, math.nan, sent)
        comm_s, exposed_s = self._before.comm_s, self._before.exposed_s
        if self.ddp is not None:
            sampled = self.ddp._get_ddp_logging_data()
            comm = sampled.get("avg_backward_comm_time", 0) / 1e9
            hidden = sampled.get("avg_backward_compute_comm_overlap_time", 0) / 1e9
            steps = self.steps - self._steps_before
            comm_s += comm * steps
            exposed_s += max(0.0, comm - hidden) * steps
        return CommTotals(comm_s, exposed_s, sent)
