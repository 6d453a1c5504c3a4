"""Disturbances of a run at a place that can be named: setups of `pooled`.

As a script this is train.py with the disturbance that DISTURBANCE in its environment names.
"""

import itertools
import json
import math
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.distributed as dist

import train
from co2.app.compose import preflight
from co2.start import launch
from co2.train import loop, samples, state_file
from co2.train.stop import StopVote
from tasks import TASKS


@dataclass(frozen=True)
class Disturbance:
    """What happens in one segment of a run."""

    what: str
    """"stop": all workers are told to, and save. "kill": a worker is, and so all. "fail": all raise
    an error. "nan": a worker's loss is not finite. "full": a worker has no room for what it saves,
    and then all are told to stop. "none": nothing happens."""
    place: str = "step"
    """Whose calls are counted: "step" (its end), "loss" (of a micro-batch), "evaluate", "write" (of
    a checkpoint's part), "fsync", "rename", "summary"."""
    count: int = 1
    """It happens as the place is met for this time in the segment; perhaps never."""
    worker: int = 0
    """Who is killed, or has no room."""
    everybody: bool = False
    """Whether all processes of its session are killed with it."""

    def setting(self, task: str, noisy: bool, ahead: bool) -> dict[str, Any]:
        """For `pooled`: see `disturbed`."""
        return {"setup": disturbed, "setup_arguments": (self, task, noisy, ahead)}


NOTHING = Disturbance("none")


def _worker() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def disturbed(
    disturbance: Disturbance, task: str, noisy: bool, ahead: bool = False
) -> Iterator[None]:
    """Setup: the disturbance.

    Args:
        noisy: every loss draws from all global generators of random numbers, as dropout and
            augmentation may.
        ahead: batches are made one step ahead, as on a GPU.
    """
    kind = TASKS[task]
    places: dict[str, tuple[object, str]] = {
        "loss": (kind, "loss"),
        "evaluate": (kind, "evaluate"),
        "write": (state_file, "write"),
        "fsync": (os, "fsync"),
        "rename": (Path, "rename"),
        "summary": (loop, "sum_up"),
    }
    with ExitStack() as stack:
        if ahead:
            stack.enter_context(_batches_ahead(to_the_end=disturbance == NOTHING))
        if noisy:
            stack.enter_context(patch.object(kind, "loss", _with_noise(kind.loss)))
        if disturbance.what == "full":
            stack.enter_context(patch.object(state_file, "write", _without_room(disturbance)))
        if disturbance.place == "step":
            calls = itertools.count(1)
            told = disturbance.what in ("stop", "full")
            vote = lambda *_: next(calls) == disturbance.count and told  # noqa: E731
            stack.enter_context(patch.object(StopVote, "__call__", vote))
        else:
            owner, name = places[disturbance.place]
            stack.enter_context(patch.object(owner, name, _ending(disturbance, owner, name)))
        yield


class AtOnce:
    """Stands in for `BatchCopies` on a GPU: the copy is there before anybody takes it."""

    overlap = True
    made: ClassVar["list[AtOnce]"] = []

    def __init__(self, device: torch.device) -> None:
        self.begun = self.taken = 0
        self.made.append(self)

    def still_busy(self) -> Callable[[], bool]:
        return lambda: True

    def begin(self, batch: Any) -> Callable[[], Any]:
        self.begun += 1
        copied = tuple(part.clone() for part in batch)
        assert self.begun - self.taken <= 1, "more than one batch is ahead"

        def take() -> Any:
            self.taken += 1
            return copied

        return take


@contextmanager
def _batches_ahead(to_the_end: bool) -> Iterator[None]:
    with patch.object(samples, "BatchCopies", AtOnce):
        AtOnce.made.clear()
        yield
    if to_the_end:  # a store of graphs would plan its reads anew for a batch after the last one
        assert [own.begun - own.taken for own in AtOnce.made] == [0]


def _with_noise(original: Callable[..., Any]) -> Callable[..., Any]:
    def loss(*arguments: Any) -> Any:
        drawn = random.gauss(0, 1) + float(np.random.randn()) + torch.randn(()).item()
        return original(*arguments) * (1 + 0.1 * math.tanh(drawn))

    return loss


def _without_room(disturbance: Disturbance) -> Callable[..., Any]:
    original = state_file.write

    def write(*arguments: Any) -> Any:
        if _worker() == disturbance.worker:
            raise OSError(28, "No space left on device")
        return original(*arguments)

    return write


def _ending(disturbance: Disturbance, owner: object, name: str) -> Callable[..., Any]:
    """The function, in whose call of that number the worker is killed, or fails."""
    original, calls = getattr(owner, name), itertools.count(1)

    def call(*arguments: Any, **more: Any) -> Any:
        if next(calls) == disturbance.count:
            if disturbance.what == "fail":
                raise ArithmeticError("of the test")
            if _worker() == disturbance.worker and disturbance.what == "nan":
                return original(*arguments, **more) * math.nan
            if _worker() == disturbance.worker:
                os.kill(0 if disturbance.everybody else os.getpid(), signal.SIGKILL)
        return original(*arguments, **more)

    return call


if "DISTURBANCE" in os.environ:
    PLAN = disturbed(Disturbance(**json.loads(os.environ["DISTURBANCE"])), "toy", noisy=True)
    PLAN.__enter__()

if __name__ == "__main__":
    found: list[Any] = []
    preflight(train.APP.conf, sys.argv[1:], lambda *job: found.append(train.APP.validate(*job)))
    sys.exit(launch.run(train.APP.work, found[0]))
