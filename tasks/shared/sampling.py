"""The choice of the samples of each micro-batch."""

from collections.abc import Sequence, Sized
from typing import NamedTuple

import numpy as np

from co2.config import TrainConfig, Validation
from co2.errors import ConfigError, require

Stretches = Sequence[tuple[int, int]]
"""From which draw on how many workers drew: `Mesh.stretches`."""


class _Stretch(NamedTuple):
    """Draws of as many workers."""

    draw: int
    """The first one."""
    size: int
    """Samples of a draw, of all workers together."""
    epoch: int
    """That of the first draw."""
    first: int
    """Where in its permutation the first draw begins."""


class Sampler:
    """Chooses the samples of a micro-batch as a pure function of (seed, draw, worker).

    A draw takes one micro-batch for every worker: `batch_size * num_workers` samples. Each epoch
    has a permutation of its own and floor(num_samples / size of a draw) draws, so within an epoch
    no sample is used twice, by any workers; the few samples left over are not used in that epoch.
    The samples of a draw depend on its size only, not on the number of workers that divide it.

    With `global_batch` an epoch has floor(num_samples / global_batch) of these, so that the samples
    of a step depend on neither the size of a micro-batch nor the number of workers.

    Where workers have come or gone, the epoch under way goes on from the sample that it had come
    to, in the same permutation: within it, too, no sample is used twice.

    With `repeats` above 1 an epoch has as many draws, but takes only a part of the samples, each of
    them `repeats` times: repeated augmentation (Hoffer et al., "Augment your batch", 2020), as
    DeiT's RASampler does it. The repeats of a sample are neighbours in a draw, which is dealt out
    to the workers one by one. So with `repeats` workers or more each goes to another worker.

    Args:
        num_samples: number of samples of the training set.
        num_workers: number of workers that draw at the same time.
        batch_size: number of samples in a micro-batch of one worker.
        seed: seed of the permutations.
        stretches: from which draw on how many workers drew, the last entry being these; empty where
            there were always as many.
        global_batch: `train.global_batch`.
        repeats: how often a sample is taken in an epoch, if at all.
    Raises:
        ConfigError: the training set does not fill one draw, or one global batch.
    """

    def __init__(
        self,
        num_samples: int,
        num_workers: int,
        batch_size: int,
        seed: int,
        stretches: Stretches = (),
        global_batch: int | None = None,
        repeats: int = 1,
    ) -> None:
        if global_batch is not None and global_batch > num_samples:
            hint = f"the training data hold {num_samples} samples; use at most that many"
            raise ConfigError("train.global_batch", global_batch, hint)
        if num_workers > num_samples:
            hint = f"the training data hold {num_samples} samples, fewer than workers"
            raise ConfigError("launch.workers", num_workers, f"{hint}; use at most {num_samples}")
        used = num_samples - num_samples % (global_batch or 1)
        if batch_size * num_workers > used:
            hint = (
                f"{num_workers} workers draw {batch_size * num_workers} samples at once, the "
                f"training data hold {used}; use at most {used // num_workers}"
            )
            raise ConfigError("train.batch_size", batch_size, hint)
        self.num_samples = num_samples
        self.num_workers = num_workers
        self.batch_size = batch_size
        self.seed = seed
        self._used = used
        """Samples of an epoch, before what does not fill a draw is left out."""
        self.repeats = repeats
        self.draws_per_epoch = used // (batch_size * num_workers)
        """Of an epoch that these workers begin."""
        self._stretches: list[_Stretch] = []
        for draw, workers in stretches or ((0, num_workers),):
            place = self._place(draw) if self._stretches else (0, 0)
            self._stretches.append(_Stretch(draw, batch_size * workers, *place))
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.uint32)

    @classmethod
    def of(
        cls,
        train: TrainConfig,
        num_samples: int,
        num_workers: int,
        stretches: Stretches = (),
        repeats: int = 1,
    ) -> "Sampler":
        """The sampler of a run with these settings. Raises `ConfigError`."""
        size, whole = train.batch_size, train.global_batch
        return cls(num_samples, num_workers, size, train.seed, stretches, whole, repeats)

    def indices(self, draw: int, worker: int) -> np.ndarray:
        """Return the samples of one micro-batch.

        Args:
            draw: index of the micro-batch, from 0, counted over all epochs.
            worker: from 0 to num_workers - 1.
        Returns:
            int64 [batch_size], each from 0 to num_samples - 1.
        """
        assert draw >= 0 and 0 <= worker < self.num_workers
        epoch, first = self._place(draw)
        places = first + self._places(worker)
        return self._order(epoch)[places // self.repeats].astype(np.int64)

    def views(self, draw: int, worker: int) -> np.ndarray:
        """Return the number of each sample's view: epoch · repeats + which of the repeats it is.
        This is the epoch where nothing is repeated. It enters the key of the augmentation, so that
        no two views are alike.

        Returns:
            int64 [batch_size].
        """
        epoch, first = self._place(draw)
        return epoch * self.repeats + (first + self._places(worker)) % self.repeats

    def epoch(self, draw: int) -> int:
        """Return the epoch, from 0, that this draw belongs to."""
        return self._place(draw)[0]

    def _places(self, worker: int) -> np.ndarray:
        """Return which samples of a draw are this worker's, int64 [batch_size]."""
        own = np.arange(self.batch_size)
        if self.repeats > 1:
            return own * self.num_workers + worker
        return worker * self.batch_size + own

    def _place(self, draw: int) -> tuple[int, int]:
        """Return the epoch of a draw, and where in its permutation the draw begins."""
        stretch = next(s for s in reversed(self._stretches) if s.draw <= draw)
        left = (self._used - stretch.first) // stretch.size
        passed = draw - stretch.draw
        if passed < left:
            return stretch.epoch, stretch.first + passed * stretch.size
        per_epoch = self._used // stretch.size
        epochs, position = divmod(passed - left, per_epoch)
        return stretch.epoch + 1 + epochs, position * stretch.size

    def _order(self, epoch: int) -> np.ndarray:
        """Return the permutation of an epoch. For 10 M samples, making it takes 40 MB and 0.2 s."""
        if epoch != self._epoch:
            order = np.arange(self.num_samples, dtype=np.uint32)
            np.random.default_rng((self.seed, epoch)).shuffle(order)
            self._epoch, self._permutation = epoch, order
        return self._permutation


_BLOCKS = 64
"""Blocks of neighbours into which validation samples are divided, before these are dealt in turn to
the two halves."""


def validation_samples(
    available: int, wanted: int | None, part: Validation, alternate: bool = False
) -> np.ndarray:
    """Return the validation samples that an evaluation takes.

    Args:
        available: number of samples in the whole validation set.
        wanted: number of samples to take, evenly spread; None takes all of the part.
        part: `DataConfig.validation`. Samples of "report" and of "tuning" depend on nothing but
            `available`, so no sample is ever in both.
        alternate: whether every second sample is in the same half, for samples that are sorted by
            class. Otherwise `_BLOCKS` blocks of neighbours are, because neighbouring pieces of a
            text are alike.
    Returns:
        int64, ascending.
    Raises:
        ConfigError: the part is empty.
    """
    samples = np.arange(available)
    if part is not Validation.all:
        blocks = available if alternate else min(available, _BLOCKS)
        half = samples * blocks // max(available, 1) % 2
        samples = samples[half == (0 if part is Validation.report else 1)]
    hint = f"the validation data hold {available} samples, too few for halves; use all"
    require(len(samples) > 0, "data.validation", part.value, hint)
    return samples[spread(len(samples), wanted)]


def evaluated(part: Validation, samples: Sized) -> dict[str, object]:
    """Return which validation samples an evaluation takes, for `Task.fingerprint`."""
    return {"part": part.value, "num_samples": len(samples)}


def spread(available: int, wanted: int | None) -> np.ndarray:
    """Return all indices below `available`, or `wanted` of them evenly spread, int64 ascending."""
    number = min(wanted or available, available)
    return np.arange(number) * available // number
