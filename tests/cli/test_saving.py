"""A checkpoint that is written while training goes on: of the step it was asked for, or absent."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from co2.comm.background_mean import Arriving, BackgroundMean
from co2.comm.mesh import Mesh
from co2.train import state_file
from co2.train.checkpoint import Checkpoints, Written
from co2.train.state_file import HostCopy
from tests.cli.harness import Run, metrics, pooled
from tests.cli.test_checkpoint import ALONE, assert_state, checkpoints, state
from tests.workers import Pool

LIMIT_S = 300.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def disk_that_waits() -> Iterator[threading.Event]:
    """Nothing is written before the event."""
    goes, original = threading.Event(), state_file.write

    def write(*arguments: Any) -> None:
        assert goes.wait(LIMIT_S)
        original(*arguments)

    with patch.object(state_file, "write", write):
        yield goes


def test_it_is_of_the_step_that_was_asked_for(tmp_path: Path) -> None:
    """Whatever training changes before it is written."""
    saver, trained = checkpoints(tmp_path), state(1)
    with disk_that_waits() as goes:
        saver.start(1, trained)
        for name in ("weight", "half", "count"):
            trained[name].zero_()
        trained["nested"]["lr"].append("later")
        trained["nested"]["more"] = 1
        assert saver.steps() == []
        goes.set()
        assert saver.finish() == 1
    assert_state(checkpoints(tmp_path).load(), 1)


def test_the_next_one_waits_for_the_one_before(tmp_path: Path) -> None:
    """So that there is one copy of the state at most, and none is overwritten."""
    saver, begun = checkpoints(tmp_path), []

    def train() -> None:
        for step in (1, 2):
            saver.start(step, state(step))
            begun.append(step)

    with disk_that_waits() as goes:
        thread = threading.Thread(target=train)
        thread.start()
        until(lambda: begun == [1])
        time.sleep(0.2)
        assert begun == [1]
        goes.set()
        thread.join()
        assert saver.finish() == 2
    assert saver.steps() == [2, 1]
    for step in (2, 1):
        assert_state(saver.load(), step)
        (tmp_path / f"step_{step}").rename(tmp_path / f"old_{step}")


def test_without_finish_it_is_published_too(tmp_path: Path) -> None:
    saver = checkpoints(tmp_path)
    saver.start(1, state(1))
    until(lambda: saver.steps() == [1])
    saver.close()
    assert_state(checkpoints(tmp_path).load(), 1)


def test_whoever_ends_by_itself_waits_for_it(tmp_path: Path) -> None:
    """A loss that is not finite: the message names the checkpoint that is just being written."""
    saver = checkpoints(tmp_path)
    with disk_that_waits() as goes:
        saver.start(1, state(1))
        threading.Timer(0.2, goes.set).start()
        saver.settle()
    assert saver.steps() == [1]


def tensors(step: int) -> dict[str, Tensor]:
    return {name: value for name, value in state(step).items() if isinstance(value, Tensor)}


class TestHostCopy:
    def test_the_memory_is_used_again(self) -> None:
        copy, first, second = HostCopy(), tensors(1), tensors(2)
        one = copy.take(first)
        places = {name: one[name].data_ptr() for name in first}
        other = copy.take(second)
        assert {name: other[name].data_ptr() for name in places} == places
        assert all(torch.equal(other[name], second[name]) for name in places)
        assert not any(other[name].data_ptr() == second[name].data_ptr() for name in places)

    def test_another_shape_gets_other_memory(self) -> None:
        copy = HostCopy()
        for value in (torch.ones(3), torch.ones(5), torch.ones(5).double(), torch.ones(2, 3).t()):
            taken = copy.take({"value": value})["value"]
            assert torch.equal(taken, value) and taken.dtype == value.dtype
            assert taken.stride() == value.stride()


def mean_under_way(rank: int, world: int, rounds: int) -> list[tuple[bool, list[float], float]]:
    """Of each round: whether the state was taken while the mean was under way, the copy of its
    buffer, and its first element after training has overwritten the buffer."""
    mean, copy = BackgroundMean(4, Mesh.world(device="cpu")), HostCopy()
    gate = Mesh.world(device="cpu").new_group_across_replicas("gloo")
    found = []
    for number in range(rounds):
        if rank == 1:  # the other one cannot have the mean before this
            torch.distributed.barrier(group=gate)
        mean.start(torch.full((4,), float(rank + 10 * number)))
        taken = mean.state_dict(arriving=True)
        under_way = isinstance(taken["buffer"], Arriving)
        copied = copy.take({"buffer": taken["buffer"]})["buffer"]
        if rank == 0:
            torch.distributed.barrier(group=gate)
        arrived = mean.wait()
        assert arrived is not None
        arrived.fill_(-1.0)
        copy.wait()
        found.append((under_way, copied.tolist(), float(mean.buffer[0])))
    mean.close()
    return found


def test_a_mean_under_way_is_not_waited_for(workers: Pool) -> None:
    """It is copied when it is there, before anybody can change it."""
    for found in workers.run(mean_under_way, 2, 5):
        assert found == [(True, [0.5 + 10 * number] * 4, -1.0) for number in range(5)]


def failed_mean(rank: int, world: int, folder: str) -> tuple[list[int], list[str]]:
    """The other one is gone before it has sent its part of a mean."""
    lines: list[str] = []
    mean = BackgroundMean(4, Mesh.world(device="cpu"))
    if rank == 1:
        torch.distributed.destroy_process_group()
        return [], lines
    mean.start(torch.ones(4))
    taken = mean.state_dict(arriving=True)
    saver = Checkpoints(Path(folder), ALONE, None, 2, lines.append)
    saver.start(1, taken)
    assert saver.finish() is None
    with contextlib.suppress(RuntimeError):
        mean.wait()
    mean._runner.give_up()  # as an elastic run does, which goes on without the lost one
    return saver.steps(), lines


def test_a_mean_that_fails_is_not_saved(workers: Pool, tmp_path: Path) -> None:
    (steps, lines), _ = workers.run(failed_mean, 2, str(tmp_path))
    assert steps == [] and len(lines) == 1 and "step 1 could not be saved (worker 0: " in lines[0]


def two(rank: int, world: int, folder: str, lines: list[str], keep: int = 3) -> Checkpoints:
    mesh = Mesh.world(device="cpu")
    return Checkpoints(
        Path(folder), mesh, mesh.new_group_across_replicas("gloo"), keep, lines.append
    )


def run_ahead(rank: int, world: int, folder: str) -> list[int]:
    """Worker 0 begins three checkpoints before worker 1 begins its first."""
    saver = two(rank, world, folder, [])
    if rank == 1:
        torch.distributed.barrier()
    for step in (1, 2, 3):
        saver.start(step, {**state(step), "rank": rank})
    if rank == 0:
        torch.distributed.barrier()
    assert saver.finish() == 3
    found = saver.load()
    assert_state(found, 3)
    assert found is not None and found[1]["rank"] == rank
    return saver.steps()


def test_nobody_waits_for_another(workers: Pool, tmp_path: Path) -> None:
    assert workers.run(run_ahead, 2, str(tmp_path)) == [[3, 2, 1]] * 2


def lose(rank: int, world: int, folder: str, victim: int, written: bool) -> tuple[list[int], str]:
    """A worker is lost while step 2 is under way; the other one goes on alone."""
    lines: list[str] = []
    saver = two(rank, world, folder, lines)
    assert saver.save(1, state(1))
    if rank != victim or written:
        saver.start(2, state(2))
    if rank == victim:
        if written:
            assert saver._last is not None
            saver._last.part.result()
        torch.distributed.barrier()
        saver._publisher.shutdown(wait=False, cancel_futures=True)  # as far as it has come
        return [], ""
    torch.distributed.barrier()
    saver.regroup(ALONE, None)
    steps = saver.steps()
    assert saver.save(3, state(3)), "saving goes on"
    assert_state(saver.load(), 3)
    saver.close()
    return steps, "\n".join(lines)


@pytest.mark.parametrize(
    ("written", "steps", "line"),
    [
        (False, [1], "step 2 could not be saved (worker 1 is gone); the one before is kept"),
        (True, [2, 1], ""),
    ],
)
def test_a_worker_is_lost(
    workers: Pool, tmp_path: Path, written: bool, steps: list[int], line: str
) -> None:
    """What it had not written is given up; what is whole is published."""
    found, _ = workers.run(lose, 2, str(tmp_path), 1, written)
    assert found == (steps, line)
    assert not list(tmp_path.glob(".*"))


def test_the_worker_that_publishes_is_lost(workers: Pool, tmp_path: Path) -> None:
    _, (steps, line) = workers.run(lose, 2, str(tmp_path), 0, False)
    assert steps == [1]
    assert line == "step 2 could not be saved (worker 0 is gone); the one before is kept"
    assert not list(tmp_path.glob(".*"))


def cannot_tell(rank: int, world: int, folder: str) -> tuple[list[bool], list[str]]:
    """At step 1 worker 1 can neither write nor say so."""
    lines: list[str] = []
    saver = two(rank, world, folder, lines)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with contextlib.ExitStack() as stack:
        if rank == 1:
            stack.enter_context(patch.object(state_file, "write", full))
            stack.enter_context(patch.object(Written, "notify", full))
        saver.start(1, state(1))
        assert saver._last is not None
        saver._last.part.result()
    saver.start(2, state(2))
    if rank == 0:
        until(lambda: saver.steps() == [2])
    return [saver.finish() == 2, saver.save(3, state(3))], lines


def test_a_worker_that_cannot_even_say_so_is_told_of_later(workers: Pool, tmp_path: Path) -> None:
    """It does not hold up the checkpoints that follow."""
    (first, lines), (other, _) = workers.run(cannot_tell, 2, str(tmp_path))
    assert first == other == [True, True]
    assert len(lines) == 1 and "step 1 could not be saved (worker 1: " in lines[0]


def end_early(rank: int, world: int, folder: str) -> tuple[list[int], list[str]]:
    """After step 1 is saved, worker 0 begins step 2 alone, and ends."""
    lines: list[str] = []
    saver = two(rank, world, folder, lines)
    assert saver.save(1, state(1))
    if rank == 0:
        saver.start(2, state(2))
    saver.close()
    return saver.steps(), lines


def test_one_that_ends_early_gives_up_what_others_have_not_written(
    workers: Pool, tmp_path: Path
) -> None:
    (steps, lines), _ = workers.run(end_early, 2, str(tmp_path))
    assert steps == [1] and not list(tmp_path.glob(".*"))
    assert lines == ["step 2 could not be saved (worker 1 is gone); the one before is kept"]


@contextlib.contextmanager
def slow_disk(seconds: float) -> Iterator[None]:
    """Setup: every fsync takes so long."""
    original = os.fsync

    def fsync(file: int) -> None:
        time.sleep(seconds)
        original(file)

    with patch.object(os, "fsync", fsync):
        yield


def test_training_goes_on_while_the_disk_is_slow(workers: Pool, tmp_path: Path) -> None:
    """Every fsync takes two seconds, and still the steps after the first checkpoint are told before
    it is published. The summary says how long training has stood still."""
    arguments = ("method=co2", "co2.tau=3", "train.steps=12", "log.every=1", "checkpoint.every=6")
    runs = {}
    for name, setup in (("slow", slow_disk), ("quick", contextlib.nullcontext)):
        own = (2.0,) if name == "slow" else ()
        more = {"runs": tmp_path / name, "setup": setup, "setup_arguments": own}
        runs[name] = pooled(workers, 2, *arguments, **more)  # type: ignore[arg-type]
        assert runs[name].status == 0, runs[name].err
    told = metrics(runs["slow"].folder, "train")
    assert [line["step"] for line in told] == list(range(1, 13))
    assert (runs["slow"].folder / "checkpoints" / "step_12").exists()
    assert saving_s(runs["slow"]) > 2.0, "the last one is waited for"
    assert saving_s(runs["quick"]) > 0


def saving_s(run: Run) -> float:
    from co2.record.metrics import Summary

    summary = Summary.read(run.folder)
    assert summary is not None and summary.saving_s is not None
    return summary.saving_s


def test_arriving_in_a_state_by_itself() -> None:
    """With nothing under way the copy is there at once."""
    mean = BackgroundMean(3, ALONE)
    mean.start(torch.arange(3.0))
    taken = mean.state_dict(arriving=True)
    assert isinstance(taken["buffer"], Arriving) and not isinstance(taken["buffer"], Tensor)
    copied = HostCopy().take({"buffer": taken["buffer"]})["buffer"]
    mean.buffer.zero_()
    assert copied.tolist() == [0.0, 1.0, 2.0]
    assert isinstance(mean.state_dict()["buffer"], Tensor), "others get tensors"


def full_for_all(rank: int, world: int, folder: str) -> list[str]:
    """No worker can write its part, nor say so, before worker 0 has told of its own."""
    lines: list[str] = []
    saver = two(rank, world, folder, lines)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with patch.object(state_file, "write", full), patch.object(Written, "notify", full):
        saver.start(1, state(1))
        if rank == 0:
            until(lambda: len(lines) > 0)
        assert saver.finish() is None
    return lines


def test_a_disk_that_is_full_for_all_is_told_of_at_once(workers: Pool, tmp_path: Path) -> None:
    lines, others = workers.run(full_for_all, 2, str(tmp_path))
    (line,) = lines
    assert "step 1 could not be saved (worker 0: " in line and "No space left" in line
    assert others == []
