"""LossWatch: ends a run whose loss is not finite, before the loss reaches the other replicas."""

import math
import os

import torch
from torch import Tensor

from co2 import faults
from co2.errors import DIVERGED
from co2.train.checkpoint import Checkpoints
from co2.train.run import Run


class LossWatch:
    """The training losses since the last check.

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
