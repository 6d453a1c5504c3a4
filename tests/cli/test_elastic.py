"""Replicas that are lost and come back: the others train on, and repeat no step."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from co2.errors import PREEMPTED, ConfigError
from co2.record.files import whole_lines
from co2.record.lock import NAME
from recipes.runs.ledger import doubled_and_left_out
from recipes.runs.processes import is_running, process, running
from tests.cli.harness import (
    LIMIT_S,
    assert_same_run,
    cli,
    command,
    configured,
    folder_of,
    kill_session,
    metrics,
    saved_steps,
    started,
    story,
    until,
    weights,
    workers,
)
from tests.grids import grid
from tests.server import environment

STEPS, TAU, BATCH = 120, 6, 16
SHARED = (
    *("launch.workers=3", f"train.steps={STEPS}", "train.eval_every=30", "log.every=1"),
    *("checkpoint.every=0", f"train.batch_size={BATCH}"),
)
SLOW = "toy.delay_s=0.01"
ELASTIC = (*SHARED, "launch.elastic=true", "launch.silent_s=20")
METHODS = {
    "local_sgd": (),
    "co2": ("co2.outer_momentum=0.1",),
    "co2_keep": ("co2_keep.average_moments=true", "optim.name=adamw", "optim.lr=1e-2"),
    "streaming_diloco": ("streaming_diloco.delay=2",),
    "eager_diloco": ("eager_diloco.outer_momentum=0.2",),
    "desloc": (
        *("optim.name=adamw", "optim.lr=1e-2", "desloc.first_moment_every=6"),
        "desloc.second_moment_every=12",
    ),
    "mt_dao": (
        *("optim.name=adamw", "optim.lr=1e-2", "mt_dao.first_moment_every=6"),
        "mt_dao.late_momentum=true",
    ),
}


def words(method: str) -> tuple[str, ...]:
    return (f"method={method}", f"{method}.tau={TAU}", *METHODS[method])


def disturbed(
    tmp_path: Path, *arguments: str, at: int, victims: tuple[int, ...], number: int
) -> tuple[int, Path, str]:
    """A run whose victims get a signal after a step: its exit status, folder and output."""
    runs, log = tmp_path / "runs", tmp_path / "log"
    folder = folder_of(*arguments, runs=runs)
    with started(*arguments, runs=runs, log=log) as run:
        until(lambda: bool(metrics(folder)) and metrics(folder)[-1]["step"] >= at, run)
        pids = workers(run)
        for victim in victims:
            os.kill(pids[victim], number)
        status = run.wait(LIMIT_S)
    return status, folder, log.read_text()


def changes(folder: Path) -> list[dict[str, Any]]:
    return metrics(folder, "members")


def assert_no_step_is_missing(folder: Path) -> None:
    steps = [line["step"] for line in metrics(folder, "train")]
    assert steps == list(range(1, STEPS + 1)), "every step once"
    assert [line["step"] for line in metrics(folder, "eval")] == [30, 60, 90, 120]


@pytest.mark.parametrize("method", grid(["co2_keep", "streaming_diloco"], "co2_keep".__eq__))
def test_a_run_that_loses_nobody_is_the_same_run(tmp_path: Path, method: str) -> None:
    plain, elastic = (*SHARED, *words(method)), (*ELASTIC, *words(method))
    for name, arguments in (("plain", plain), ("elastic", elastic)):
        ended = cli(*arguments, runs=tmp_path / name)
        assert ended.status == 0, ended.err
    one = folder_of(*elastic, runs=tmp_path / "elastic")
    other = folder_of(*plain, runs=tmp_path / "plain")
    assert other.parent.name == f"{one.parent.name}-workers3", "it may go on with another number"
    assert_same_run(one, other)


@pytest.mark.parametrize(
    ("method", "victims"),
    [
        *(("co2", (0,)), ("co2_keep", (2,)), ("desloc", (0, 2))),
        pytest.param("mt_dao", (1,), marks=pytest.mark.slow),
        pytest.param("local_sgd", (1,), marks=pytest.mark.slow),
        pytest.param("streaming_diloco", (0,), marks=pytest.mark.slow),
        pytest.param("eager_diloco", (1,), marks=pytest.mark.slow),
    ],
)
def test_those_that_are_left_go_on(tmp_path: Path, method: str, victims: tuple[int, ...]) -> None:
    """SIGKILL amid a round, also to the worker that writes, and to two at once."""
    ledger = tmp_path / "ledger"
    arguments = (*ELASTIC, SLOW, *words(method), "toy.samples=480", f"toy.ledger={ledger}")
    status, folder, text = disturbed(
        tmp_path, *arguments, at=32, victims=victims, number=signal.SIGKILL
    )
    assert status == 0, text
    assert_no_step_is_missing(folder)
    lost = {int(one) for change in changes(folder) for one in change["lost"]}
    assert lost == set(victims) and changes(folder)[-1]["members"] == sorted({0, 1, 2} - lost)
    doubled, left_out = doubled_and_left_out([ledger], samples=480)
    draws = [line[0] for path in ledger.glob("*.jsonl") for line in whole_lines(path)]
    assert len(draws) < 3 * STEPS, "the ledger is of all three"
    assert doubled == 0, "no sample is seen twice in an epoch"
    # A loss is noticed at the end of the next round at most.
    assert left_out < (2 * TAU * len(victims) + 3) * BATCH, (
        "none is left out but of these, and what fills no batch"
    )
    summary = read_summary(folder)
    assert summary["members"] == changes(folder), "the summary says when and who"
    assert math.isfinite(summary["final"]["loss"]) and summary["final"]["accuracy"] > 0.6
    assert all(value.isfinite().all() for value in weights(folder).values())
    assert all(f"worker {one} is lost (gone)" in text for one in victims)
    assert not (folder / NAME).exists(), "who has taken over held the folder, too, and freed it"


def read_summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_one_that_stands_still_is_given_up_and_replaced(tmp_path: Path) -> None:
    """SIGSTOP for longer than `silent_s`; another worker is started in its place, and joins."""
    more = ("launch.restarts=1", "launch.silent_s=10", "toy.delay_s=0.1")
    status, folder, text = disturbed(
        tmp_path, *ELASTIC, *words("co2"), *more, at=20, victims=(1,), number=signal.SIGSTOP
    )
    assert status == 0, text
    assert_no_step_is_missing(folder)
    (lost, joined) = changes(folder)
    assert list(lost["lost"]) == ["1"] and "silent for" in lost["lost"]["1"]
    assert joined["joined"] == [3] and joined["members"] == [0, 2, 3]
    assert joined["step"] % TAU == 0, "at a round's end"


def test_with_too_few_a_run_saves_and_ends_to_be_started_again(tmp_path: Path) -> None:
    arguments = (*ELASTIC, SLOW, *words("local_sgd"), "launch.min_replicas=2", "launch.wait_s=1")
    status, folder, text = disturbed(
        tmp_path, *arguments, at=32, victims=(0, 1), number=signal.SIGKILL
    )
    assert status == PREEMPTED, text
    (step,) = saved_steps(folder)
    assert step >= 32 and f"step {step}: 1 replicas, fewer than launch.min_replicas=2" in text
    again = cli(*arguments, runs=tmp_path / "runs")
    assert again.status == 0, again.err
    assert f"resumed at step {step} of {STEPS}" in again.out
    assert_no_step_is_missing(folder)


def test_a_run_that_has_made_its_last_step_waits_for_nobody(tmp_path: Path) -> None:
    """The others notice the loss in the mean at the end of the last round."""
    arguments = (*ELASTIC, SLOW, "method=local_sgd", f"local_sgd.tau={STEPS}")
    arguments = (*arguments, "launch.min_replicas=3", "launch.wait_s=1")
    status, folder, text = disturbed(
        tmp_path, *arguments, at=95, victims=(1,), number=signal.SIGKILL
    )
    assert status == 0, text
    assert changes(folder)[-1]["step"] == STEPS - 1, "the mean of the last step"
    assert_no_step_is_missing(folder)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_resumed_with_another_number_of_replicas(tmp_path: Path, before: int, after: int) -> None:
    arguments = ("launch.elastic=true", "train.steps=60", "log.every=1", "train.eval_every=60")
    arguments = (*arguments, *words("co2"), "checkpoint.every=20")
    runs, log = tmp_path / "runs", tmp_path / "log"
    first = (*arguments, f"launch.workers={before}", SLOW, "tag=one")
    folder = folder_of(*first, runs=runs)
    with started(*first, runs=runs, log=log) as run:
        until(lambda: 20 in saved_steps(folder), run)  # two thirds of the run are left
        for pid in workers(run):
            os.kill(pid, signal.SIGKILL)
        assert run.wait(LIMIT_S) != 0
    step = max(saved_steps(folder))
    ended = cli(*first, f"launch.workers={after}", runs=runs)
    assert ended.status == 0, ended.err
    assert f"resumed at step {step} of 60" in ended.out
    assert read_summary(folder)["workers"] == after
    assert [line["step"] for line in metrics(folder, "train")] == list(range(1, 61))


def test_told_to_stop_all_stop_at_the_same_step(tmp_path: Path) -> None:
    arguments = (*ELASTIC, SLOW, *words("co2"))
    status, folder, text = disturbed(
        tmp_path, *arguments, at=20, victims=(2,), number=signal.SIGTERM
    )
    assert status == PREEMPTED, text
    (step,) = saved_steps(folder)
    assert step < STEPS, "also in the midst of a round"
    ended = cli(*arguments, runs=tmp_path / "runs")
    assert ended.status == 0, ended.err
    whole = cli(*ELASTIC, *words("co2"), runs=tmp_path / "whole")
    assert whole.status == 0, whole.err
    undisturbed = whole.folder
    assert story(folder) == story(undisturbed), "resumed by as many, it is the same run"
    assert all(
        torch.equal(weights(folder)[name], value) for name, value in weights(undisturbed).items()
    )


def until_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "a worker outlives what started it"
        time.sleep(0.05)


@pytest.mark.slow  # new interpreters: a forked worker would hold the store's own connection
def test_workers_end_when_what_started_them_is_killed(tmp_path: Path) -> None:
    """The store in which they agree is gone with it; the next start goes on from a checkpoint."""
    arguments = (*ELASTIC, *words("co2"), "checkpoint.every=10", "toy.delay_s=0.05")
    runs, log = tmp_path / "runs", tmp_path / "log"
    folder = folder_of(*arguments, runs=runs)
    with started(*arguments, runs=runs, log=log, interpreter=True) as run:
        until(lambda: 20 in saved_steps(folder), run)
        pids = workers(run)
        os.kill(run.pid, signal.SIGKILL)
        run.wait(LIMIT_S)
        until_ended(pids)
    assert log.read_text().count("what holds the store is gone; the same command goes on") == 3
    assert "Traceback" not in log.read_text()
    ended = cli(*arguments, runs=runs)
    assert ended.status == 0 and "resumed at step" in ended.out


@pytest.mark.parametrize(
    "more",
    [("launch.elastic=true",), ("launch.elastic=true", "launch.restarts=1"), ()],
    ids=["elastic", "restarts", "fixed"],
)
def test_without_the_fork_server_a_run_ends_to_be_started_again(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    """It alone learns how workers end, so nobody can tell any more which of them train."""
    arguments = (*SHARED, *words("co2"), "checkpoint.every=10", "toy.delay_s=0.05", *more)
    runs, log = tmp_path / "runs", tmp_path / "log"
    folder = folder_of(*arguments, runs=runs)
    with started(*arguments, runs=runs, log=log) as run:
        until(lambda: 20 in saved_steps(folder), run)
        pids = workers(run)
        trained = process(pids[0])
        assert trained is not None
        os.kill(trained.parent, signal.SIGKILL)
        assert run.wait(LIMIT_S) == PREEMPTED, log.read_text()
        until_ended(pids)
    line = "error: the fork server is gone; the same command goes on from the last checkpoint\n"
    assert log.read_text().endswith(line) and "Traceback" not in log.read_text()
    ended = cli(*arguments, runs=runs)
    assert ended.status == 0 and "resumed at step" in ended.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("method=allreduce",), "method=allreduce: has no rounds at whose end"),
        (("method=sparseloco",), "method=sparseloco: what a replica has not sent yet"),
        (("method=noloco",), "method=noloco: a pair's exchange does not recover"),
        (("method=co2", "co2.tau=auto"), "method=co2: tau=auto times rounds"),
        (("method=co2", "co2.shard=true"), "method=co2: co2.shard=true leaves each replica"),
        (("method=co2", "launch.min_replicas=3"), "must be at most launch.workers, which is 2"),
    ],
)
def test_what_cannot_be_elastic_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        configured("launch.elastic=true", *arguments, runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow  # five interpreters start
def test_torchrun_starts_all_workers_again(tmp_path: Path) -> None:
    """Without launch.elastic: they go on from the last checkpoint."""
    runs = tmp_path / "runs"
    arguments = (*words("co2"), f"train.steps={STEPS}", "log.every=1", "checkpoint.every=20")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    _, *program = command(*arguments, "toy.delay_s=0.02", runs=runs)
    folder = folder_of(*arguments, "toy.delay_s=0.02", runs=runs)
    log = tmp_path / "log"
    with log.open("w") as out:
        run = subprocess.Popen(
            [sys.executable, *torchrun, "--max-restarts=1", *program],
            cwd=tmp_path,
            env=environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until(lambda: 40 in saved_steps(folder), run)
        started = sorted(one.pid for one in running() if one.parent == run.pid)
        os.kill(started[1], signal.SIGKILL)
        assert run.wait(LIMIT_S) == 0, log.read_text()
    finally:
        kill_session(run)
    assert "resumed at step" in log.read_text()
    assert [line["step"] for line in metrics(folder, "train")] == list(range(1, STEPS + 1))


def test_under_torchrun_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="starts the workers of an elastic run itself"):
        configured("launch.elastic=true", "method=co2", runs=tmp_path / "runs")
