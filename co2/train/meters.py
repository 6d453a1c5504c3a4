"""Losses, throughput, exposed communication, and the memory ledger of one worker."""

import math
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from co2 import faults
from co2.comm.collectives import local
from co2.errors import DIVERGED
from co2.methods.base import Method, MethodStats
from co2.record.metrics import Ledger, Metrics
from co2.train.checkpoint import Checkpoints
from co2.train.replica import local_optimizer
from co2.train.run import Run


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
        """Model FLOP utilization (Chowdhery et al., arXiv 2204.02311, appendix B): what is computed
        again in the backward pass does not count.

        Args:
            per_gpu: tokens or samples in a second of one GPU.
        """
        return per_gpu * self.flops_per_unit / self.peak_flops

    def seen_in(self, metrics: Metrics, gpus: int) -> Metrics:
        """The same figures, with those of one of so many GPUs."""
        per_gpu = metrics.throughput / gpus
        return replace(metrics, per_gpu=per_gpu, mfu=self.mfu(per_gpu))


class Meter:
    """Counts steps, and turns a method's totals into figures for an interval.

    Args:
        stats: the method's `stats`.
        totals: of the segments before, as `state_dict` gave them.
    """

    def __init__(
        self,
        stats: Callable[[], MethodStats],
        totals: dict[str, Any] | None = None,
    ) -> None:
        self.totals = Totals(**(totals or {}))
        self._stats = stats
        self._began = self._last = time.perf_counter()
        self._wall_before = self.totals.wall_s
        self._first = True
        self._interval_s, self._interval_units = 0.0, 0
        self._waited_s = self._interval_data_s = 0.0
        self._before = self._stats()

    def step(self, units: int) -> None:
        """A step has ended. The first of a segment allocates and compiles, so it is not timed.

        Args:
            units: tokens or samples that all workers together have trained on in it.
        """
        now = time.perf_counter()
        self.totals.steps += 1
        if not self._first:
            self.totals.train_s += now - self._last
            self.totals.data_s += self._waited_s
            self.totals.timed_units += units
            self._interval_s += now - self._last
            self._interval_data_s += self._waited_s
            self._interval_units += units
        self._first = False
        self._waited_s = 0.0
        self._last = now

    def settle(self) -> None:
        """The last step has ended only now, because a GPU was behind the host."""
        now = time.perf_counter()
        if not self._first:
            self.totals.train_s += now - self._last
            self._interval_s += now - self._last
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
        """What happens inside is waiting for data, a part of the step.

        Args:
            hidden: asked at the end: whether a GPU has worked all the time, so that nothing waited.
        """
        began = time.perf_counter()
        yield
        if not hidden():
            self._waited_s += time.perf_counter() - began

    def interval(self, step: int, loss: float, lr: float) -> Metrics:
        """The figures of the steps since the last call; `step`, `loss` and `lr` are as they are
        now."""
        stats, before = self._stats(), self._before
        exposed_s = _grown(before.exposed_s, stats.exposed_s)
        metrics = Metrics(
            step=step,
            loss=loss,
            lr=lr,
            throughput=_rate(self._interval_units, self._interval_s),
            comm_s=_grown(before.comm_s, stats.comm_s),
            exposed_s=exposed_s,
            bytes=stats.bytes_sent - before.bytes_sent,
            exposed_share=_share(exposed_s, self._interval_s),
            data_share=_share(self._interval_data_s, self._interval_s),
            own=stats.own,
        )
        self._before = stats
        self._interval_s, self._interval_data_s, self._interval_units = 0.0, 0.0, 0
        return metrics

    def throughput(self) -> float:
        """Units per second of all workers, over every timed step."""
        return _rate(self.totals.timed_units, self.totals.train_s)

    def state_dict(self) -> dict[str, Any]:
        """The totals so far, as plain values."""
        self.totals.wall_s = self._wall_before + time.perf_counter() - self._began
        return asdict(self.totals)


class LossWatch:
    """The training losses since the last check. It ends a run whose loss is not finite, before that
    reaches the other replicas.

    Reading a loss makes the host wait for a GPU, so on a GPU losses are checked where the loop asks
    for it; on a CPU also after every step.

    Args:
        run: the run; worker and device are its mesh's.
        checkpoints: names the last good checkpoint in the message.
    """

    def __init__(self, run: Run, checkpoints: Checkpoints) -> None:
        self._worker, self._checkpoints = run.mesh.worker, checkpoints
        self._at_once = run.mesh.device.type != "cuda"
        self._steps: list[int] = []
        self._losses: list[Tensor] = []
        self._last = math.nan

    def add(self, step: int, loss: Tensor) -> None:
        """The loss of the step with this index, a scalar. On a CPU it is checked."""
        self._steps.append(step)
        self._losses.append(loss)
        if self._at_once:
            self.check()

    def check(self) -> float:
        """The newest loss. Raises `SystemExit(DIVERGED)` where one since the last check is not
        finite, with one line for a person."""
        losses = torch.stack(self._losses).tolist() if self._losses else []
        for step, loss in zip(self._steps, losses, strict=True):
            self._last = loss
            if not math.isfinite(loss):
                self._end(step + 1, loss)
        self._steps.clear()
        self._losses.clear()
        return self._last

    def _end(self, step: int, loss: float) -> None:
        self._checkpoints.settle()
        steps = self._checkpoints.steps()
        folder = os.path.relpath(self._checkpoints.folder)
        last = f"{folder}/step_{steps[0]}" if steps else "none"
        faults.tell(
            f"error: the loss is {loss} at step {step} on worker {self._worker}; "
            f"last good checkpoint: {last}; "
            "try a lower optim.lr, a longer warm-up or train.clip_norm=1",
            fault="a loss that is not finite",
        )
        raise SystemExit(DIVERGED)


def ledger(model: nn.Module, optimizer: Optimizer, method: Method) -> Ledger:
    """Bytes that one worker holds between steps, its gradients included.

    All of it is what this worker holds of its replica. With comm.device=cpu the method's copies and
    its scratch lie in the host's memory, and a GPU holds neither.
    """
    trained = [local(p.detach()) for p in model.parameters() if p.requires_grad]
    inner = local_optimizer(optimizer).state.values()
    beside = method.state_device.type == trained[0].device.type
    return Ledger(
        parameter_bytes=_bytes(model.parameters()),
        buffer_bytes=_bytes(model.buffers()),
        gradient_bytes=_bytes(trained),
        inner_state_bytes=_bytes(
            value for state in inner for value in state.values() if isinstance(value, Tensor)
        ),
        scratch_bytes=method.scratch_bytes if beside else 0,
        extra_bytes=method.extra_bytes if beside else 0,
        host_bytes=0 if beside else method.extra_bytes + method.scratch_bytes,
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this worker has held: of the GPU's allocator, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _grown(before: float, now: float) -> float:
    """What came to a total of seconds. AllReduce's are DDP's averages times the steps so far, and
    fall a little where a step was quicker than the average."""
    return 0.0 if now < before else now - before


def _rate(units: int, seconds: float) -> float:
    return units / seconds if seconds > 0 else 0.0


def _share(part: float, seconds: float) -> float:
    """0 where no step was timed, as where the only one is a segment's first. Not a number where
    `part` is none."""
    return part * (1 / seconds if seconds > 0 else 0)


def _bytes(tensors: Iterable[Tensor]) -> int:
    held = (local(tensor.detach()) for tensor in tensors)
    return sum(part.numel() * part.element_size() for part in held)
