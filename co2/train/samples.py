"""Samples: which micro-batches a worker draws, and how many of them make a step.

Every worker draws samples of its own, also those that share a replica. So a step of the whole run
has batch_size × accumulate × workers samples. A recipe names that product, `train.global_batch`,
and `accumulate` follows from it once the number of workers is known: the same training on any
number of workers.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from co2.config import Config, Resume, TrainConfig
from co2.errors import ConfigError, require
from co2.record.fingerprint import BATCHES, digest
from co2.record.folder import begun, run_folder
from co2.streams import BatchCopies
from co2.task import Batch
from co2.train.run import Run


class Samples:
    """The micro-batches of one worker.

    All workers count alike, also the steps that one of them skips, so that the same number stands
    for the same place in the data on each of them.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.draws = 0
        """Global micro-batch counter."""
        self.behind = 0
        """How many of them this worker has not drawn yet, because it has skipped steps."""
        self.stretches: list[list[int]] = []
        """`Mesh.stretches` of the mesh that these are drawn with."""
        self._batches: Iterator[Any] = iter(())
        self.copies = BatchCopies(run.mesh.device)
        self.digests: list[str] = []
        """Of the first micro-batches of the run, for its fingerprint."""
        self._coming: deque[Callable[[], Any]] = deque(maxlen=1)
        """The next micro-batch, on its way to the GPU; `draws` does not count it yet."""

    def begin(self) -> None:
        """Draw from here on, as one of the run's workers as they now are."""
        self.close()
        stretches = tuple((draw, workers) for draw, workers in self.stretches)
        mesh = replace(self._run.mesh, stretches=stretches)
        self._batches = self._run.task.batches(mesh, self.draws - self.behind)

    def regroup(self, before: int) -> None:
        """Workers, `before` so many, have come or gone: all share out anew what follows. What this
        one has not drawn yet is left out."""
        known = self.stretches or [[0, before]]
        now = [self.draws, self._run.mesh.num_workers]
        self.stretches = [*(one for one in known if one[0] < self.draws), now]
        self.behind = 0

    def close(self) -> None:
        """End the loader of a task. An iterator that is no generator has nothing to end."""
        self._coming.clear()
        if isinstance(self._batches, Generator):
            self._batches.close()

    def next(self) -> Any:
        """The next micro-batch, where the model is: a tensor, or a tuple or a dict of tensors."""
        self.draws += 1
        if self._coming:
            return self._coming.popleft()()
        return self.copies.begin(self._drawn())()

    def prefetch(self) -> None:
        """Make the next micro-batch, and begin to copy it, while a GPU works on this one. On a CPU
        nothing: it would have to stop working for it."""
        if self.copies.overlap:
            with suppress(StopIteration):  # `next` raises it
                self._coming.append(self.copies.begin(self._drawn()))

    def _drawn(self) -> Batch:
        batch = next(self._batches)
        if len(self.digests) < BATCHES:
            self.digests.append(digest(batch))
        return batch

    def skip_step(self) -> None:
        """Count a step without drawing; its samples wait for this replica's next one."""
        self.draws += self.accumulate
        self.behind += self.accumulate

    @property
    def accumulate(self) -> int:
        """Micro-batches of a step, as the workers now are."""
        return self._run.config.train.micro_batches(self._run.mesh.num_workers)

    def units(self, workers: int) -> int:
        """Tokens or samples of a step that so many workers make."""
        size = self._run.config.train.batch_size
        return size * self.accumulate * workers * self._run.task.units_per_sample

    def compared(self, before: int) -> str:
        """The global batch now, and with the number of workers that there was before, in words."""
        train, workers = self._run.config.train, (self._run.mesh.num_workers, before)
        now, then = (train.batch_size * train.micro_batches(one) * one for one in workers)
        return f", on {now} samples a step, before {then}"


def accumulated(config: Config, workers: int) -> Config:
    """The run on so many workers: with `train.global_batch` it has the `train.accumulate` that
    follows. An elastic run on several machines does not know its workers yet, and keeps 1.

    Raises:
        ConfigError: both keys are given, or the workers' micro-batches do not divide
            `train.global_batch`. An elastic run that goes on rounds instead: its replicas come and
            go.
    """
    train, launch = config.train, config.launch
    if train.global_batch is None:
        return config
    hint = f"follows from train.global_batch={train.global_batch}; give one of the two"
    require(train.accumulate == 1, "train.accumulate", train.accumulate, hint)
    if launch.store is not None:
        return config
    divides = train.global_batch % (train.batch_size * workers) == 0
    resumes = launch.elastic and config.resume is Resume.auto
    if not divides and not (resumes and begun(run_folder(config))):
        hint = _mend(train, train.global_batch, workers)
        raise ConfigError("train.global_batch", train.global_batch, hint)
    return replace(config, train=replace(train, accumulate=train.micro_batches(workers)))


def _mend(train: TrainConfig, wanted: int, workers: int) -> str:
    """What divides: the three nearest global batches of these micro-batches; and the micro-batch,
    not above this one, with which `wanted` divides, or else what is nearest to it."""
    at_once = train.batch_size * workers
    times = wanted // at_once
    multiples = [at_once * number for number in range(max(1, times - 1), times + 4)]
    low, middle, high = sorted(sorted(multiples, key=lambda size: abs(size - wanted))[:3])
    hint = (
        f"is no multiple of the {at_once} samples that {workers} workers draw at once "
        f"(train.batch_size={train.batch_size} each); use {low}, {middle} or {high}"
    )
    share = max(1, round(wanted / workers))
    sizes = range(1, min(train.batch_size, share) + 1)
    other = f"train.batch_size={max(size for size in sizes if share % size == 0)}"
    if share * workers in (low, middle, high):
        return hint
    if share * workers != wanted:
        other = f"train.global_batch={share * workers} {other}"
    return f"{hint}, or {other}"
