"""Losses, throughput, exposed communication and memory of one worker."""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from co2.comm.collectives import local
from co2.errors import DIVERGED
from co2.methods.base import Method, MethodStats
from co2.record.metrics import Ledger, Metrics
from co2.start import failures
from co2.train.checkpoint import Checkpoints
from co2.train.run import Run
from co2.train.within_replica import local_optimizer


@dataclass
class Totals:
    """What a run has taken so far, over all its segments."""

    steps: int = 0
    passed_over: int = 0
    """Those of `steps` that this worker has not made itself (co2/elastic/quorum.py)."""
    train_s: float = 0.0
    """Seconds of training steps, without evaluation, checkpoints and start-up."""
    data_s: float = 0.0
    """Seconds of `train_s` that were spent waiting for batches."""
    timed_units: int = 0
    """Tokens or samples that all workers trained on in `train_s`."""
    wall_s: float = 0.0
    saving_s: float = 0.0
    """Seconds in which training stood still for checkpoints; not in `train_s`."""


@dataclass(frozen=True)
class Utilization:
    """How well the GPUs of a run are used. None of it is known on other devices."""

    flops_per_unit: float
    """Floating-point operations of the model for a token or sample, forward and backward."""
    peak_flops: float
    """Of one GPU: co2/gpus.py."""

    def mfu(self, per_gpu: float) -> float:
        """Model FLOP utilization (Chowdhery et al., arXiv 2204.02311, appendix B) of one GPU at so
        many tokens or samples a second: what is computed again in the backward pass does not
        count."""
        return per_gpu * self.flops_per_unit / self.peak_flops

    def seen_in(self, metrics: Metrics, gpus: int) -> Metrics:
        """The same figures, with those of one of so many GPUs."""
        per_gpu = metrics.throughput / gpus
        return replace(metrics, per_gpu=per_gpu, mfu=self.mfu(per_gpu))


class Meter:
    """Counts steps, and turns a method's totals into figures for an interval.

    Args:
        stats: the method's `stats`.
    """

    def __init__(self, stats: Callable[[], MethodStats]) -> None:
        self.totals = Totals()
        self._first = True
        self._waited_s = 0.0
        self._stats = stats
        self.begin()

    def begin(self) -> None:
        """Training begins, or goes on after `load_state_dict`."""
        self._last = time.perf_counter()
        self._began = self._last - self.totals.wall_s
        self._before = self._stats(), replace(self.totals)
        """Of the method and of this worker, when the interval began."""

    def step(self, units: int) -> None:
        """A step has ended, in which all workers together have trained on so many tokens or
        samples. The first of a segment allocates and compiles, so it is not timed."""
        self.settle()
        self.totals.steps += 1
        if not self._first:
            self.totals.data_s += self._waited_s
            self.totals.timed_units += units
        self._first, self._waited_s = False, 0.0

    def settle(self) -> None:
        """Count the time until now to the last step: the host has waited for the GPU."""
        now = time.perf_counter()
        if not self._first:
            self.totals.train_s += now - self._last
        self._last = now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count as training time."""
        began = time.perf_counter()
        yield
        self._last += time.perf_counter() - began

    @contextmanager
    def saving(self) -> Iterator[None]:
        """What happens inside holds training up for a checkpoint."""
        began = time.perf_counter()
        with self.paused():
            yield
        self.totals.saving_s += time.perf_counter() - began

    @contextmanager
    def waiting(self, hidden: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Count the time inside as waiting for data, unless `hidden()` says at the end that the GPU
        was busy throughout. It remains a part of the step."""
        began = time.perf_counter()
        yield
        if not hidden():
            self._waited_s += time.perf_counter() - began

    def interval(self, step: int, loss: float, lr: float) -> Metrics:
        """The figures of the steps since the last call; `step`, `loss` and `lr` are as they are
        now."""
        stats, totals = self._stats(), replace(self.totals)
        stats_before, before = self._before
        self._before = stats, totals
        seconds = totals.train_s - before.train_s
        # AllReduce's are DDP's averages times the steps so far, which fall a little where a step
        # was quicker than the average. In this order `max` keeps what is not a number.
        exposed_s = max(stats.exposed_s - stats_before.exposed_s, 0.0)
        return Metrics(
            step=step,
            loss=loss,
            lr=lr,
            throughput=_per(totals.timed_units - before.timed_units, seconds),
            comm_s=max(stats.comm_s - stats_before.comm_s, 0.0),
            exposed_s=exposed_s,
            bytes=stats.bytes_sent - stats_before.bytes_sent,
            exposed_share=_per(exposed_s, seconds),
            data_share=_per(totals.data_s - before.data_s, seconds),
            own=stats.own,
        )

    def throughput(self) -> float:
        """Units per second of all workers, over every timed step."""
        return _per(self.totals.timed_units, self.totals.train_s)

    def state_dict(self) -> dict[str, Any]:
        """The totals so far, as plain values."""
        self.totals.wall_s = time.perf_counter() - self._began
        return asdict(self.totals)

    def load_state_dict(self, totals: dict[str, Any]) -> None:
        """Go on from the totals of the segments before."""
        self.totals = Totals(**totals)


class LossWatch:
    """The training losses since the last check. It ends a run whose loss, validation loss or state
    is not finite, if it can before that reaches the other replicas, and names the last good
    checkpoint.

    Reading a loss makes the host wait for a GPU, so on a GPU losses are checked where the loop asks
    for it; on a CPU also after every step.
    """

    def __init__(self, run: Run, checkpoints: Checkpoints) -> None:
        self._worker, self._checkpoints = run.mesh.worker, checkpoints
        self._at_once = run.mesh.device.type != "cuda"
        self._new: list[tuple[int, Tensor]] = []
        self._last = math.nan
        self.first: Tensor | None = None
        """Of the run's first step; None where this worker did not make it."""

    def add(self, step: int, loss: Tensor) -> None:
        """The loss of the step with this index, a scalar. On a CPU it is checked."""
        self._new.append((step, loss))
        if step == 0:
            self.first = loss
        if self._at_once:
            self.check()

    def check(self) -> float:
        """Return the newest loss. Raises `SystemExit(DIVERGED)`, with one line for a person, if a
        loss since the last check, or a state to be saved, is not finite."""
        losses = torch.stack([loss for _, loss in self._new]).tolist() if self._new else []
        for (step, _), loss in zip(self._new, losses, strict=True):
            self._last = loss
            if not math.isfinite(loss):
                self._end(f"the loss is {loss} at step {step + 1} on worker {self._worker}")
        self._new.clear()
        if self._checkpoints.diverged:
            self._end(self._checkpoints.diverged)
        return self._last

    def check_validation(self, step: int, scores: Mapping[str, float]) -> None:
        """Raises as `check` does where the "loss" of an evaluation is not finite."""
        loss = scores.get("loss", 0.0)
        if not math.isfinite(loss):
            self._end(f"the validation loss is {loss} at step {step}")

    def _end(self, what: str) -> NoReturn:
        self._checkpoints.settle()
        steps = self._checkpoints.steps()
        folder = os.path.relpath(self._checkpoints.folder)
        last = f"{folder}/step_{steps[0]}" if steps else "none"
        failures.tell(
            f"error: {what}; last good checkpoint: {last}; "
            "try a lower optim.lr, a longer warm-up or train.clip_norm=1",
            failure="a loss that is not finite",
        )
        raise SystemExit(DIVERGED)


def ledger(model: nn.Module, optimizer: Optimizer, method: Method) -> Ledger:
    """Bytes that one worker holds between steps, its gradients included.

    All of it is what this worker holds of its replica. With comm.device=cpu the method's copies and
    its scratch lie in the host's memory, and a GPU holds neither.
    """
    trained = [local(p.detach()) for p in model.parameters() if p.requires_grad]
    inner = [
        value for state in local_optimizer(optimizer).state.values() for value in state.values()
    ]
    beside = method.state_device.type == trained[0].device.type
    return Ledger(
        parameter_bytes=_bytes(model.parameters()),
        buffer_bytes=_bytes(model.buffers()),
        gradient_bytes=_bytes(trained),
        inner_state_bytes=_bytes(value for value in inner if isinstance(value, Tensor)),
        scratch_bytes=method.scratch_bytes if beside else 0,
        extra_bytes=method.extra_bytes if beside else 0,
        host_bytes=0 if beside else method.extra_bytes + method.scratch_bytes,
    )


def _per(amount: float, seconds: float) -> float:
    """`amount` per second: 0 if no step was timed, as in a segment of one step, and NaN if `amount`
    is NaN."""
    return amount * (1 / seconds if seconds > 0 else 0.0)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor.detach()).nbytes for tensor in tensors)
