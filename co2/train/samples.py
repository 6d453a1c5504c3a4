"""Samples: which micro-batches a worker draws, and how many of them make a step."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from co2.copies import Copies
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
        self.stretches: tuple[tuple[int, int], ...] = ()
        """`Mesh.stretches` of the mesh that these are drawn with."""
        self._batches: Iterator[Any] = iter(())
        self._copies = Copies(run.mesh.device)
        self._coming: deque[Callable[[], Any]] = deque(maxlen=1)
        """The next micro-batch, on its way to the GPU; `draws` does not count it yet."""

    def begin(self) -> None:
        """Draw from here on, as one of the run's workers as they now are."""
        self.close()
        mesh = replace(self._run.mesh, stretches=self.stretches)
        self._batches = self._run.task.batches(mesh, self.draws - self.behind)

    def regroup(self, before: int) -> None:
        """Workers, `before` so many, have come or gone: all share out anew what follows. What this
        one has not drawn yet is left out."""
        known = self.stretches or ((0, before),)
        now = self.draws, self._run.mesh.num_workers
        self.stretches = (*(one for one in known if one[0] < self.draws), now)
        self.behind = 0

    def close(self) -> None:
        """End what makes batches ahead. A task may return an iterator that has nothing to end."""
        self._coming.clear()
        if isinstance(self._batches, Generator):
            self._batches.close()

    def next(self) -> Any:
        """The next micro-batch, where the model is."""
        self.draws += 1
        if self._coming:
            return self._coming.popleft()()
        return self.to_device(next(self._batches))

    def still_busy(self) -> Callable[[], bool]:
        """See `Copies`."""
        return self._copies.still_busy()

    def prefetch(self) -> None:
        """Make the next micro-batch, and begin to copy it, while a GPU works on this one. On a CPU
        nothing: it would have to stop working for it."""
        if self._copies.overlap:
            with suppress(StopIteration):  # for whoever asks for the next one
                self._coming.append(self._copies.begin(next(self._batches)))

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

    def to_device(self, batch: Any) -> Any:
        """A batch where the model is. `Any`: a tensor, or a tuple or a dict of tensors."""
        return self._copies.begin(batch)()
