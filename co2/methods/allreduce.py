"""AllReduce: gradients are averaged at every step, overlapped with backward.

This is PyTorch's own DistributedDataParallel (DDP), unmodified, so that the baseline is the one
that people use. It averages over all workers, whatever the size of a replica. If fully_shard has
sharded the parameters over a replica's workers, it also averages their gradients over the replicas
(its hybrid mode), and DDP is not needed. Gradients of experts that the workers of a replica share
are averaged over the replicas one by one (co2/comm/gradient_mean.py).
Buffers are treated as in every other method: they are local during training and averaged in the
consensus. DDP's default would send those of replica 0 before every forward pass.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from co2.comm.clocks import CommTotals
from co2.comm.collectives import check_reduced, data_parallel, local
from co2.comm.gradient_mean import GradientMean
from co2.config import Precision
from co2.errors import WrongCall, require
from co2.limits import Limited
from co2.methods.base import HOST, Method


class AllReduce(Method):
    averages_gradients = True
    equal_weights = True
    _before = CommTotals()
    """What the segments before this one have cost, if the run was resumed."""
    _steps_before = 0
    _went_forward = False
    """Whether a forward pass went through DDP since the last step."""

    @dataclass
    class Config(Limited):
        """DDP has no hyper-parameters of its own."""

    def refusals(self) -> dict[str, str]:
        host = "keeps no copies of the model, and DDP averages where gradients are; use auto"
        return {**super().refusals(), HOST: host}

    def set_up(self) -> nn.Module:
        self.keep(self, "clocks")
        self.ddp: DistributedDataParallel | None = None
        self.experts: GradientMean | None = None
        """What averages gradients that DDP leaves alone; None where it leaves none."""
        of_all = self.mesh.num_workers
        cut: list[Any] = [p for p in self.model.parameters() if local(p) is not p]
        self.sharded = bool(cut)
        workers = min((p.device_mesh.size() for p in cut), default=of_all)
        require(
            workers == of_all,
            "model",
            f"sharded over {workers} of {of_all} workers",
            "nobody averages over the others; give fully_shard a two-dimensional mesh of all",
        )
        if self.mesh.num_workers == 1 or self.sharded:
            return self.model
        self.ddp = ddp = data_parallel(self.model, self.comm)
        ddp.register_forward_pre_hook(self._goes_forward)
        weights = self.model.named_parameters()
        own = [p for name, p in weights if name in ddp.parameters_to_ignore and p.requires_grad]
        across = self.mesh.new_group_across_replicas() if own else None
        if across is not None:
            self.experts = GradientMean(own, across, lambda: ddp.require_backward_grad_sync)
        if self.comm.dtype is Precision.bf16:
            self.ddp.register_comm_hook(None, bf16_compress_hook)
        if self.mesh.device.type == "cpu":
            self.ddp._set_ddp_runtime_logging_sample_rate(1)  # on a GPU each sample would wait
        return self.ddp

    def update(self) -> None:
        if self.ddp is not None:
            if not self._went_forward or not self.ddp.require_backward_grad_sync:
                raise WrongCall(
                    "no forward pass went through the module that prepare returned, or no_sync() "
                    "is not over, so gradients were not averaged: model = sync.prepare(model, "
                    "optimizer, mesh)"
                )
            check_reduced(self.ddp)
            self._went_forward = False
        self.inner_step()

    def _goes_forward(self, *_: object) -> None:
        self._went_forward |= torch.is_grad_enabled()  # an evaluation has no gradients to average

    @property
    def clocks(self) -> dict[str, float]:
        """What communication has cost in all segments."""
        totals = self.totals()
        return {"comm_s": totals.comm_s, "exposed_s": totals.exposed_s}

    @clocks.setter
    def clocks(self, before: dict[str, float]) -> None:
        self._before = CommTotals(**before)

    def loaded(self) -> None:
        self._steps_before = self.steps

    @property
    def extra_bytes(self) -> int:
        """DDP's buckets are the gradients, so they are no extra copy. For bf16 DDP makes rounded
        gradients beside them, half a copy, which cannot be named as tensors here."""
        rounded = self.ddp is not None and self.comm.dtype is Precision.bf16
        return self.copy_bytes // 2 if rounded else 0

    def bytes_per_step(self) -> int:
        """Return the bytes that one worker sends in one step: 2(G−1)/G of its gradients. G is the
        number of workers under DDP, and that of replicas for what a worker holds a part of."""
        workers, replicas = self.mesh.num_workers, self.mesh.num_replicas
        left_alone = self.ddp.parameters_to_ignore if self.ddp is not None else ()
        halved = self.comm.dtype is Precision.bf16
        payload = dict.fromkeys((workers, replicas), 0)
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                size = replicas if self.sharded or name in left_alone else workers
                part = local(param.detach())
                payload[size] += part.numel() * (2 if halved else part.element_size())
        return sum(2 * (size - 1) * sent // size for size, sent in payload.items())

    def totals(self) -> CommTotals:
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
        totals = CommTotals(comm_s, exposed_s, sent)
        return totals if self.experts is None else totals + self.experts.totals()
