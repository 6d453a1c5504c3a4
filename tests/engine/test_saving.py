"""When a run saves by the clock, whose workers have clocks of their own; and who tells
whom that it has saved."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from co2 import Mesh
from co2.config import CheckpointConfig
from co2.errors import ConfigError
from co2.train import saving
from co2.train.checkpoint import Checkpoints, Written
from co2.train.saving import Look, SaveTimes
from tests.cli.harness import assert_same_run, metrics, pooled, saved_steps
from tests.workers import Pool, replicas


class Clock:
    """What the suite's clock says."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Iterator[Clock]:
    with patch.object(saving, "time", Clock()) as found:
        yield found


def saves(
    clock: Clock, config: CheckpointConfig, seconds: list[float], begun: int = 0
) -> tuple[list[int], int]:
    """The steps after which one worker saves whose steps take so long, and how many times it has
    looked."""
    looks = 0

    def gather(own: Look) -> list[Look]:
        nonlocal looks
        looks += 1
        return [own]

    found, steps = [], begun + len(seconds)
    times = SaveTimes(config, steps, gather)
    times.begin(begun)
    for step, taken_s in enumerate(seconds, begun + 1):
        clock.now_s += taken_s
        if times.due(step):
            found.append(step)
    return found, looks


def test_about_so_often_with_few_looks(clock: Clock) -> None:
    found, looks = saves(clock, CheckpointConfig(every=0, every_s=60), [0.5] * 1000)
    gaps = [after - before for before, after in zip([0, *found], found, strict=False)]
    assert all(105 <= gap <= 130 for gap in gaps[:-1]) and found[-1] == 1000
    assert looks <= 16


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_steps_that_become_faster_or_slower(clock: Clock, factor: float) -> None:
    """The first ones compile, or send nothing yet: the time between two checkpoints is never more
    than what the steps have just become, and one look, make of it."""
    steps = [1.0] * 5 + [factor] * 2000
    found, _ = saves(clock, CheckpointConfig(every=0, every_s=100), steps)
    ends = [sum(steps[:step]) for step in found]
    gaps = [after - before for before, after in zip([0.0, *ends], ends, strict=False)]
    assert max(gaps) <= 110 + 20 * factor


def test_steps_that_take_longer(clock: Clock) -> None:
    found, _ = saves(clock, CheckpointConfig(every=0, every_s=10), [1.0] + [100.0] * 9)
    assert found == [*range(2, 11)]


def test_beside_the_steps(clock: Clock) -> None:
    config = CheckpointConfig(every=30, every_s=20)
    found, _ = saves(clock, config, [1.0] * 90)
    assert {30, 60, 90} <= set(found) and len(found) > 4
    assert saves(clock, CheckpointConfig(every=30), [1.0] * 90) == ([30, 60, 90], 0)
    assert saves(clock, CheckpointConfig(every=0), [1.0] * 90) == ([], 0)


def test_all_save_after_the_same_step(clock: Clock) -> None:
    """A worker that has come later, and one whose clock runs otherwise, do as the others."""
    seen: dict[int, list[int]] = {}
    told: list[Look] = []
    saved_s = 0.0
    config = CheckpointConfig(every=0, every_s=10)
    every = [SaveTimes(config, 200, lambda own: told) for _ in range(2)]
    late = SaveTimes(config, 200, lambda own: told)
    for one in every:
        one.begin(0)
    for step in range(1, 200):
        clock.now_s += 0.3
        if step == 50:  # it comes in
            every.append(late)
            for one in every:
                one.begin(step)
            continue
        assert len({one.looks(step) for one in every}) == 1
        told[:] = [(step, clock.now_s - saved_s, 0.3), (1, 0.1, 0.5)]
        for number, one in enumerate(every):
            if one.due(step):
                seen.setdefault(number, []).append(step)
        saved_s = clock.now_s if step in seen.get(0, ()) else saved_s
    assert (
        len(seen[0]) > 4
        and seen[0] == seen[1]
        and seen[2] == [step for step in seen[0] if step > 50]
    )


def test_in_a_run(workers: Pool, tmp_path: Path) -> None:
    """Its checkpoints change nothing, and a run goes on from them."""
    words = ("method=co2", "co2.tau=3", "train.steps=24", "train.eval_every=6", "log.every=1")
    plain = pooled(workers, 3, *words, "checkpoint.every=0", runs=tmp_path / "plain")
    clocked = ("checkpoint.every=0", "checkpoint.every_s=0.0001", "checkpoint.keep=30")
    run = pooled(workers, 3, *words, *clocked, runs=tmp_path / "clocked")
    assert run.status == plain.status == 0, run.err
    steps = saved_steps(run.folder)
    assert len(steps) > 5 and steps[-1] == 24
    assert saved_steps(plain.folder) == []
    assert metrics(run.folder)[-1]["step"] == 24
    assert_same_run(run.folder, plain.folder)


@replicas(2)
def test_where_nobody_can_tell_that_it_has_written(rank: int, tmp_path: Path) -> None:
    """On a disk that has room for the state alone, who waits for the checkpoint tells it."""
    mesh = Mesh.world()
    saved = Checkpoints(tmp_path, mesh, mesh.control_group(), 2, print)
    with patch.object(Written, "notify", side_effect=OSError(28, "No space left on device")):
        saved.start(3, {"method": {"x": torch.full((2,), rank)}})
        assert saved.finish() == 3
    saved.close()
    found = Checkpoints(tmp_path, mesh, mesh.control_group(), 2, print)
    step, state = found.load()
    found.close()
    assert step == 3 and state["method"]["x"].tolist() == [rank, rank]


@replicas(2)
def test_a_folder_that_cannot_be_listed_is_told_to_all(rank: int, tmp_path: Path) -> None:
    """Worker 0 alone looks."""
    mesh = Mesh.world()
    saved = Checkpoints(tmp_path, mesh, mesh.control_group(), 2, print)
    refusal = ConfigError("resume", "auto", "it cannot be read")
    with (
        patch.object(Checkpoints, "steps", side_effect=refusal if rank == 0 else AssertionError),
        pytest.raises(ConfigError, match="it cannot be read"),
    ):
        saved.load()
    saved.close()
