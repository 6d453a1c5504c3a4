"""A replica that is slow makes fewer steps; a global batch that stays as replicas come and go."""

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from co2.errors import PREEMPTED, ConfigError
from co2.train import state_file
from tests.cli.harness import (
    assert_same_run,
    cli,
    configured,
    folder_of,
    metrics,
    saved_steps,
    started,
    until,
    workers,
)
from tests.cli.test_checkpoint import part
from tests.cli.test_elastic import changes, disturbed, read_summary
from tests.grids import grid

STEPS, TAU = 60, 6
SHARED = (
    *("launch.workers=3", "launch.elastic=true", f"train.steps={STEPS}", "train.eval_every=30"),
    *("log.every=1", "checkpoint.every=0", "launch.silent_s=20"),
)
SLOW = ("toy.delay_s=0.03", "toy.late_s=0.09")
"""The last of the workers needs four times as long for a step."""


def words(method: str) -> tuple[str, ...]:
    return (f"method={method}", f"{method}.tau={TAU}")


def assert_every_step_once(folder: Path) -> None:
    assert [line["step"] for line in metrics(folder, "train")] == list(range(1, STEPS + 1))


def test_a_run_in_which_nobody_is_slow_is_the_same_run(tmp_path: Path) -> None:
    """With a quorum of all no replica ever is."""
    ended = [
        cli(*SHARED, *words("co2"), *more, runs=tmp_path / name)
        for name, more in (("with", ("launch.quorum=3",)), ("without", ()))
    ]
    assert [one.status for one in ended] == [0, 0], ended
    assert_same_run(ended[0].folder, ended[1].folder)
    assert read_summary(ended[0].folder)["steps_made"] == [STEPS] * 3
    assert read_summary(ended[1].folder)["steps_made"] == []


def test_one_slow_replica_does_not_slow_the_others(tmp_path: Path) -> None:
    """It makes fewer steps: so few that a busy machine, which slows all of them alike, leaves it
    behind. The first round has to be measured."""
    slow_one = ("toy.delay_s=0.05", "toy.late_s=0.35", "launch.quorum=2")
    ended = cli(*SHARED, *words("local_sgd"), *slow_one, runs=tmp_path / "runs")
    assert ended.status == 0, ended.err
    *others, slow = read_summary(ended.folder)["steps_made"]
    assert others == [STEPS, STEPS] and STEPS // TAU <= slow < 0.6 * STEPS
    assert_every_step_once(ended.folder)
    assert "worker 2 makes " in ended.out and f"of {TAU} steps in a round" in ended.out
    first, *_ = metrics(ended.folder, "steps")
    assert first["fewer"] == [2] and first["steps"]["2"] < TAU == first["steps"]["0"]
    assert first["step"] % TAU == 0, "at a round's end"


MEAN_A_ROUND = ("co2", "co2_keep", "slowmo", "diloco", "cocod_sgd", "overlap_local_sgd")


@pytest.mark.parametrize("method", grid(MEAN_A_ROUND, ("co2_keep", "slowmo").__contains__))
def test_every_method_with_a_mean_a_round_trains_on(tmp_path: Path, method: str) -> None:
    delay = ("co2_keep.delay=2",) if method == "co2_keep" else ()
    arguments = (*SHARED, *words(method), *delay, "toy.late_s=0.04", "launch.quorum=2")
    ended = cli(*arguments, runs=tmp_path / "runs")
    assert ended.status == 0, ended.err
    summary = read_summary(ended.folder)
    *others, slow = summary["steps_made"]
    assert others == [STEPS, STEPS] and slow < STEPS
    assert math.isfinite(summary["final"]["loss"]) and summary["final"]["accuracy"] > 0.5
    assert_every_step_once(ended.folder)


def test_one_that_is_lost_beside_a_slow_one_is_replaced(tmp_path: Path) -> None:
    """The slow one is the last, whoever that is: now it is the newcomer."""
    arguments = (*SHARED, *words("co2"), *SLOW, "launch.quorum=2", "launch.restarts=1")
    status, folder, text = disturbed(
        tmp_path, *arguments, at=20, victims=(0,), number=signal.SIGKILL
    )
    assert status == 0, text
    assert_every_step_once(folder)
    assert list(changes(folder)[0]["lost"]) == ["0"]
    assert "worker 2 makes " in text


def test_told_to_stop_a_slow_replica_goes_on_as_slow(tmp_path: Path) -> None:
    arguments = (*SHARED, *words("local_sgd"), *SLOW, "launch.quorum=2")
    status, folder, text = disturbed(
        tmp_path, *arguments, at=20, victims=(1,), number=signal.SIGTERM
    )
    assert status == PREEMPTED, text
    (step,) = saved_steps(folder)
    states = [read_state(folder, step, rank) for rank in range(3)]
    assert all(state["steps_in_round"] == states[0]["steps_in_round"] for state in states)
    assert states[0]["steps_in_round"][2] < TAU
    assert [state["behind"] > 0 for state in states] == [False, False, True]
    made = step - states[2]["totals"]["passed_over"]
    assert states[2]["draws"] - states[2]["behind"] == made, "every sample that it drew was used"
    ended = cli(*arguments, runs=tmp_path / "runs")
    assert ended.status == 0, ended.err
    assert_every_step_once(folder)
    *others, slow = read_summary(folder)["steps_made"]
    assert others == [STEPS, STEPS] and made < slow < STEPS - (step - made)


def read_state(folder: Path, step: int, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = state_file.read(folder / f"checkpoints/step_{step}" / part(rank))
    return found


KEPT = (
    *("train.global_batch=48", "train.batch_size=8"),
    *("toy.delay_s=0.02", "log.every=1"),
)


def test_those_that_are_left_take_over_the_samples_of_a_lost_one(tmp_path: Path) -> None:
    """Three replicas of two micro-batches become two of three."""
    arguments = (*SHARED, *words("co2"), *KEPT, "checkpoint.every=60")
    status, folder, text = disturbed(
        tmp_path, *arguments, at=14, victims=(1,), number=signal.SIGKILL
    )
    assert status == 0, text
    assert_every_step_once(folder)
    assert "2 train on, on 48 samples a step, before 48" in text
    state = read_state(folder, STEPS, 0)
    (_, three), (at, two) = state["stretches"]
    assert (three, two) == (3, 2) and at % 2 == 0
    assert state["draws"] == at + 3 * (STEPS - at // 2)


def killed_after(step: int, *arguments: str, folder: Path, runs: Path, log: Path) -> int:
    """Kill all workers once a step is saved. Returns the last one that is."""
    with started(*arguments, runs=runs, log=log) as run:
        until(lambda: max(saved_steps(folder), default=0) >= step, run)
        for pid in workers(run):
            os.kill(pid, signal.SIGKILL)
        assert run.wait() != 0
    return max(saved_steps(folder))


def test_resumed_by_fewer_and_by_as_many_as_before(tmp_path: Path) -> None:
    arguments = (*SHARED, *words("co2"), *KEPT, "checkpoint.every=6", "tag=one")
    runs, log = tmp_path / "runs", tmp_path / "log"
    place = {"folder": folder_of(*arguments, runs=runs), "runs": runs, "log": log}
    one = killed_after(12, *arguments, **place)
    other = killed_after(one + 12, *arguments, "launch.workers=2", **place)
    text = f"resumed at step {one} of {STEPS}, on 48 samples a step, before 48"
    assert text in log.read_text()
    ended = cli(*arguments, runs=runs)
    assert ended.status == 0, ended.err
    text = f"resumed at step {other} of {STEPS}, on 48 samples a step, before 48"
    assert text in ended.out
    back = 2 * one + 3 * (other - one)
    state = read_state(place["folder"], STEPS, 0)
    assert state["stretches"] == [[0, 3], [2 * one, 2], [back, 3]]
    assert state["draws"] == back + 2 * (STEPS - other)
    assert_every_step_once(place["folder"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("launch.quorum=2",), r"launch\.quorum=2: is for elastic runs; use null"),
        (
            ("launch.elastic=true", "launch.quorum=3"),
            r"launch\.quorum=3: must be at most launch\.workers, which is 2",
        ),
        *(
            (("launch.elastic=true", "launch.quorum=1", f"method={method}", *more), reason)
            for method, more, reason in (
                ("allreduce", (), "does not support weighted averaging"),
                ("eager_diloco", (), "adds its own part, 1/G"),
                ("streaming_diloco", (), "its fragments meet amid the round"),
                ("noloco", (), "the mean of a pair does not support weighted averaging"),
                ("desloc", ("optim.name=adamw",), "moments of unequal numbers of steps"),
                (
                    "diloco",
                    ("optim.name=adamw", "diloco.average_moments=true"),
                    "average_moments=true: moments of unequal numbers of steps .*; use null$",
                ),
            )
        ),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(*arguments, runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
