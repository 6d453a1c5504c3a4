"""Batches that are made one step ahead, as on a GPU, change nothing: not what is trained on, nor
where a run goes on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch

from co2.errors import PREEMPTED
from co2.train import samples
from tests.cli.harness import STORY, assert_same_run, pooled, saved_steps, stopped_after
from tests.workers import Pool


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
def ahead(*stop: int) -> Iterator[None]:
    with patch.object(samples, "BatchCopies", AtOnce):
        if not stop:
            AtOnce.made.clear()
            yield
            # A store of graphs would plan its reads anew for a batch after the last one.
            assert [own.begun - own.taken for own in AtOnce.made] == [0]
            return
        with stopped_after(*stop):
            yield


def test_a_batch_ahead_changes_nothing(workers: Pool, tmp_path: Path) -> None:
    words = (*STORY, "train.accumulate=2", "train.batch_size=4", "checkpoint.every=7")
    plain = pooled(workers, 2, *words, runs=tmp_path / "plain")
    run = pooled(workers, 2, *words, runs=tmp_path / "ahead", setup=ahead)
    assert plain.status == run.status == 0, run.err
    assert_same_run(plain.folder, run.folder)


def test_a_stopped_run_goes_on_exactly(workers: Pool, tmp_path: Path) -> None:
    """It draws the batch again that was ahead when it stopped."""
    plain = pooled(workers, 2, *STORY, runs=tmp_path / "plain")
    stopped = pooled(
        workers, 2, *STORY, runs=tmp_path / "ahead", setup=ahead, setup_arguments=(29,)
    )
    assert stopped.status == PREEMPTED and saved_steps(stopped.folder)[-1] == 29
    run = pooled(workers, 2, *STORY, runs=tmp_path / "ahead", setup=ahead)
    assert run.status == 0, run.err
    assert_same_run(plain.folder, run.folder)
