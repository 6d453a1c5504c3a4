"""Replicas of several workers are lost as a whole, and others come as a whole."""

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from co2.errors import ConfigError
from tests.cli.harness import (
    LIMIT_S,
    assert_same_run,
    cli,
    configured,
    folder_of,
    metrics,
    saved_steps,
    small,
    started,
    until,
    weights,
    workers,
)
from tests.cli.test_elastic import changes, disturbed, read_summary, words
from tests.grids import grid

STEPS, TAU = 60, 6
SHARED = (
    *("launch.workers=4", "mesh.replica_size=2", f"train.steps={STEPS}", "train.eval_every=30"),
    *("log.every=1", "checkpoint.every=0", "train.batch_size=16"),
)
ELASTIC = ("launch.elastic=true", "launch.silent_s=20")


def of(strategy: str) -> tuple[str, ...]:
    return (f"mesh.strategy={strategy}", *words("co2"))


STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


@pytest.mark.parametrize("strategy", grid(STRATEGIES, "zero2".__eq__))
def test_a_run_that_loses_nobody_is_the_same_run(tmp_path: Path, strategy: str) -> None:
    ended = [
        cli(*SHARED, *of(strategy), *more, runs=tmp_path / name)
        for name, more in (("plain", ()), ("elastic", ELASTIC))
    ]
    assert [one.status for one in ended] == [0, 0], ended
    assert_same_run(ended[0].folder, ended[1].folder)


def test_experts_shared_by_two_workers_are_the_same_run(
    tmp_path: Path, root: Path, text: Path
) -> None:
    arguments = (*small("moe", root, text), *SHARED, *of("ep"), "train.steps=8", "co2.tau=3")
    arguments = (*arguments, "train.batch_size=2", "train.eval_every=4")
    ended = [
        cli(*arguments, *more, runs=tmp_path / name)
        for name, more in (("plain", ()), ("elastic", ELASTIC))
    ]
    assert [one.status for one in ended] == [0, 0], ended
    assert_same_run(ended[0].folder, ended[1].folder)


def assert_good(status: int, folder: Path, text: str) -> list[dict[str, Any]]:
    """The run has ended well: every step once, and nothing said of it in more than a line."""
    assert status == 0 and "Traceback" not in text, text
    assert [line["step"] for line in metrics(folder, "train")] == list(range(1, STEPS + 1))
    assert [line["step"] for line in metrics(folder, "eval")] == [30, 60]
    assert math.isfinite(read_summary(folder)["final"]["loss"])
    assert all(value.isfinite().all() for value in weights(folder).values())
    return changes(folder)


@pytest.mark.parametrize(
    ("strategy", "victim", "number"),
    grid(
        [
            *((strategy, 3, signal.SIGKILL) for strategy in STRATEGIES),
            *(("zero2", 0, signal.SIGKILL), ("zero3", 2, signal.SIGSTOP)),
        ],
        lambda case: case[0] == "zero2" or case[2] == signal.SIGSTOP,
    ),
)
def test_a_worker_costs_its_replica(
    tmp_path: Path, strategy: str, victim: int, number: signal.Signals
) -> None:
    """Also the one that writes for the run. Its sibling does not wait for it, and the other
    replica goes on."""
    arguments = (*SHARED, *ELASTIC, *of(strategy), "toy.delay_s=0.02", "launch.silent_s=5")
    ended = disturbed(tmp_path, *arguments, at=10, victims=(victim,), number=number)
    (change,) = assert_good(*ended)
    lost = {2 * (victim // 2), 2 * (victim // 2) + 1}
    assert {int(one) for one in change["lost"]} == lost
    assert set(change["members"]) == {0, 1, 2, 3} - lost


@pytest.mark.parametrize("strategy", grid(STRATEGIES, "zero2".__eq__))
def test_another_replica_comes_as_a_whole(tmp_path: Path, strategy: str) -> None:
    """Its state is that of the first one: what must be equal on all is compared in every
    evaluation, bit for bit."""
    arguments = (*SHARED, *ELASTIC, *of(strategy), "toy.delay_s=0.1", "launch.restarts=1")
    ended = disturbed(tmp_path, *arguments, at=8, victims=(1,), number=signal.SIGKILL)
    lost, joined = assert_good(*ended)
    assert {int(one) for one in lost["lost"]} == {0, 1}
    assert joined["joined"] == [4, 5] and joined["members"] == [2, 3, 4, 5]
    assert joined["step"] < 54, "it has a part in a mean"


@pytest.mark.parametrize("after", grid([2, 6], (6).__eq__))
def test_resumed_with_another_number_of_replicas(tmp_path: Path, after: int) -> None:
    runs, log = tmp_path / "runs", tmp_path / "log"
    arguments = (*SHARED, *ELASTIC, *of("zero2"), "checkpoint.every=10", "tag=one")
    arguments = (*arguments, "toy.delay_s=0.02")
    folder = folder_of(*arguments, runs=runs)
    with started(*arguments, runs=runs, log=log) as run:
        until(lambda: 20 in saved_steps(folder), run)
        for pid in workers(run):
            os.kill(pid, signal.SIGKILL)
        assert run.wait(LIMIT_S) != 0
    step = max(saved_steps(folder))
    ended = cli(*arguments, f"launch.workers={after}", runs=runs)
    assert f"resumed at step {step} of {STEPS}" in ended.out
    assert_good(ended.status, folder, ended.err)
    assert read_summary(folder)["workers"] == after


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("launch.workers=3",), "must divide the 3 workers"),
        (("launch.quorum=1",), "a replica of several workers makes all its steps"),
        (("launch.min_replicas=3",), "at most launch.workers / mesh.replica_size, which is 2"),
    ],
)
def test_what_cannot_be_elastic_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(*SHARED, *ELASTIC, *of("zero2"), *arguments, runs=tmp_path / "runs")
