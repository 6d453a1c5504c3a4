"""Replicas, of one worker or of several, are lost and come back: the others train on, and repeat no
step. One that is slow makes fewer steps; a global batch stays as replicas come and go."""

import contextlib
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
from co2.train import state_file
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
    small,
    started,
    story,
    until,
    weights,
    workers,
)
from tests.cli.test_checkpoint import held
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
    "co2_keep in fragments": ("co2_keep.fragments=3", "co2_keep.momentum_weight=0.2"),
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
    name = method.partition(" ")[0]
    return (f"method={name}", f"{name}.tau={TAU}", *METHODS[method])


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


def assert_elastic_is_the_same(tmp_path: Path, *arguments: str) -> tuple[Path, Path]:
    """A run that loses nobody, and the same that is not elastic. Returns their folders."""
    elastic = ("launch.elastic=true", "launch.silent_s=20")
    ended = [
        cli(*arguments, *more, runs=tmp_path / name)
        for name, more in (("plain", ()), ("elastic", elastic))
    ]
    assert [one.status for one in ended] == [0, 0], ended
    plain, other = (one.folder for one in ended)
    assert_same_run(plain, other)
    return plain, other


@pytest.mark.parametrize("method", ["co2_keep", "co2_keep in fragments"])
def test_a_run_that_loses_nobody_is_the_same_run(tmp_path: Path, method: str) -> None:
    plain, elastic = assert_elastic_is_the_same(tmp_path, *SHARED, *words(method))
    name = f"{elastic.parent.name}-workers3"
    assert plain.parent.name == name, "it may go on with another number"


@pytest.mark.parametrize(
    ("method", "victims"),
    [
        *(("co2", (0,)), ("co2_keep", (2,)), ("desloc", (0, 2))),
        ("co2_keep in fragments", (1,)),
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


def test_under_torchrun_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="starts the workers of an elastic run itself"):
        configured("launch.elastic=true", "method=co2", runs=tmp_path / "runs")


PAIR_STEPS = 60
PAIRS = (
    *(
        "launch.workers=4",
        "mesh.replica_size=2",
        f"train.steps={PAIR_STEPS}",
        "train.eval_every=30",
    ),
    *("log.every=1", "checkpoint.every=0", "train.batch_size=16"),
)
ELASTIC_PAIRS = ("launch.elastic=true", "launch.silent_s=20")


def of(strategy: str) -> tuple[str, ...]:
    return (f"mesh.strategy={strategy}", *words("co2"))


def test_experts_shared_by_two_workers_are_the_same_run(
    tmp_path: Path, root: Path, text: Path
) -> None:
    arguments = (*small("moe", root, text), *PAIRS, *of("ep"), "train.steps=8", "co2.tau=3")
    more = ("train.batch_size=2", "train.eval_every=4")
    assert_elastic_is_the_same(tmp_path, *arguments, *more)


def assert_good(status: int, folder: Path, text: str) -> list[dict[str, Any]]:
    """The run has ended well: every step once, and nothing said of it in more than a line."""
    assert status == 0 and "Traceback" not in text, text
    assert [line["step"] for line in metrics(folder, "train")] == list(range(1, PAIR_STEPS + 1))
    assert [line["step"] for line in metrics(folder, "eval")] == [30, 60]
    assert math.isfinite(read_summary(folder)["final"]["loss"])
    assert all(value.isfinite().all() for value in weights(folder).values())
    return changes(folder)


@pytest.mark.parametrize(
    ("strategy", "victim", "number"),
    [("zero2", 3, signal.SIGKILL), ("zero2", 0, signal.SIGKILL), ("zero3", 2, signal.SIGSTOP)],
)
def test_a_worker_costs_its_replica(
    tmp_path: Path, strategy: str, victim: int, number: signal.Signals
) -> None:
    """Also the one that writes for the run. Its sibling does not wait for it, and the other
    replica goes on."""
    arguments = (*PAIRS, *ELASTIC_PAIRS, *of(strategy), "toy.delay_s=0.02", "launch.silent_s=5")
    ended = disturbed(tmp_path, *arguments, at=10, victims=(victim,), number=number)
    (change,) = assert_good(*ended)
    lost = {2 * (victim // 2), 2 * (victim // 2) + 1}
    assert {int(one) for one in change["lost"]} == lost
    assert set(change["members"]) == {0, 1, 2, 3} - lost


def test_another_replica_comes_as_a_whole(tmp_path: Path) -> None:
    """Its state is that of the first one: what must be equal on all is compared in every
    evaluation, bit for bit."""
    arguments = (*PAIRS, *ELASTIC_PAIRS, *of("zero2"), "toy.delay_s=0.1", "launch.restarts=1")
    ended = disturbed(tmp_path, *arguments, at=8, victims=(1,), number=signal.SIGKILL)
    lost, joined = assert_good(*ended)
    assert {int(one) for one in lost["lost"]} == {0, 1}
    assert joined["joined"] == [4, 5] and joined["members"] == [2, 3, 4, 5]
    assert joined["step"] < 54, "it has a part in a mean"


def test_resumed_with_another_number_of_pairs(tmp_path: Path) -> None:
    runs, log = tmp_path / "runs", tmp_path / "log"
    arguments = (*PAIRS, *ELASTIC_PAIRS, *of("zero2"), "checkpoint.every=10", "tag=one")
    arguments = (*arguments, "toy.delay_s=0.02")
    folder = folder_of(*arguments, runs=runs)
    with started(*arguments, runs=runs, log=log) as run:
        until(lambda: 20 in saved_steps(folder), run)
        for pid in workers(run):
            with contextlib.suppress(ProcessLookupError):  # killed with a sibling
                os.kill(pid, signal.SIGKILL)
        assert run.wait(LIMIT_S) != 0
    step = max(saved_steps(folder))
    ended = cli(*arguments, "launch.workers=6", runs=runs)
    assert f"resumed at step {step} of {PAIR_STEPS}" in ended.out
    assert_good(ended.status, folder, ended.err)
    assert read_summary(folder)["workers"] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("launch.workers=3",), "must divide the 3 workers"),
        (("launch.quorum=1",), "a replica of several workers makes all its steps"),
        (("launch.min_replicas=3",), "at most launch.workers / mesh.replica_size, which is 2"),
    ],
)
def test_what_pairs_cannot_be_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(*PAIRS, *ELASTIC_PAIRS, *of("zero2"), *arguments, runs=tmp_path / "runs")


QUORUM_STEPS = 60
OF_THREE = (
    *(
        "launch.workers=3",
        "launch.elastic=true",
        f"train.steps={QUORUM_STEPS}",
        "train.eval_every=30",
    ),
    *("log.every=1", "checkpoint.every=0", "launch.silent_s=20"),
)
LATE = ("toy.delay_s=0.03", "toy.late_s=0.09")
"""The last of the workers needs four times as long for a step."""


def assert_every_step_once(folder: Path) -> None:
    assert [line["step"] for line in metrics(folder, "train")] == list(range(1, QUORUM_STEPS + 1))


def test_a_run_in_which_nobody_is_slow_is_the_same_run(tmp_path: Path) -> None:
    """With a quorum of all no replica ever is."""
    ended = [
        cli(*OF_THREE, "method=co2", "co2.tau=6", *more, runs=tmp_path / name)
        for name, more in (("with", ("launch.quorum=3",)), ("without", ()))
    ]
    assert [one.status for one in ended] == [0, 0], ended
    assert_same_run(ended[0].folder, ended[1].folder)
    assert read_summary(ended[0].folder)["steps_made"] == [QUORUM_STEPS] * 3
    assert read_summary(ended[1].folder)["steps_made"] == []


def test_one_slow_replica_does_not_slow_the_others(tmp_path: Path) -> None:
    """It makes fewer steps: so few that a busy machine, which slows all of them alike, leaves it
    behind. The first round has to be measured."""
    slow_one = ("toy.delay_s=0.05", "toy.late_s=0.35", "launch.quorum=2")
    ended = cli(*OF_THREE, "method=local_sgd", "local_sgd.tau=6", *slow_one, runs=tmp_path / "runs")
    assert ended.status == 0, ended.err
    *others, slow = read_summary(ended.folder)["steps_made"]
    assert (
        others == [QUORUM_STEPS, QUORUM_STEPS] and QUORUM_STEPS // TAU <= slow < 0.6 * QUORUM_STEPS
    )
    assert_every_step_once(ended.folder)
    assert "worker 2 makes " in ended.out and f"of {TAU} steps in a round" in ended.out
    first, *_ = metrics(ended.folder, "steps")
    assert first["fewer"] == [2] and first["steps"]["2"] < TAU == first["steps"]["0"]
    assert first["step"] % TAU == 0, "at a round's end"


def test_told_to_stop_a_slow_replica_goes_on_as_slow(tmp_path: Path) -> None:
    arguments = (*OF_THREE, "method=local_sgd", "local_sgd.tau=6", *LATE, "launch.quorum=2")
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
    assert others == [QUORUM_STEPS, QUORUM_STEPS] and made < slow < QUORUM_STEPS - (step - made)


def read_state(folder: Path, step: int, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = state_file.read(held(folder / f"checkpoints/step_{step}", rank))
    return found


KEPT = (
    *("train.global_batch=48", "train.batch_size=8"),
    *("toy.delay_s=0.02", "log.every=1"),
)


def test_those_that_are_left_take_over_the_samples_of_a_lost_one(tmp_path: Path) -> None:
    """Three replicas of two micro-batches become two of three."""
    arguments = (*OF_THREE, "method=co2", "co2.tau=6", *KEPT, "checkpoint.every=60")
    status, folder, text = disturbed(
        tmp_path, *arguments, at=14, victims=(1,), number=signal.SIGKILL
    )
    assert status == 0, text
    assert_every_step_once(folder)
    assert "2 train on, on 48 samples a step, before 48" in text
    state = read_state(folder, QUORUM_STEPS, 0)
    (_, three), (at, two) = state["stretches"]
    assert (three, two) == (3, 2) and at % 2 == 0
    assert state["draws"] == at + 3 * (QUORUM_STEPS - at // 2)


def killed_after(step: int, *arguments: str, folder: Path, runs: Path, log: Path) -> int:
    """Kill all workers once a step is saved. Returns the last one that is."""
    with started(*arguments, runs=runs, log=log) as run:
        until(lambda: max(saved_steps(folder), default=0) >= step, run)
        for pid in workers(run):
            os.kill(pid, signal.SIGKILL)
        assert run.wait() != 0
    return max(saved_steps(folder))


def test_resumed_by_fewer_and_by_as_many_as_before(tmp_path: Path) -> None:
    arguments = (*OF_THREE, "method=co2", "co2.tau=6", *KEPT, "checkpoint.every=6", "tag=one")
    runs, log = tmp_path / "runs", tmp_path / "log"
    place = {"folder": folder_of(*arguments, runs=runs), "runs": runs, "log": log}
    one = killed_after(12, *arguments, **place)
    other = killed_after(one + 12, *arguments, "launch.workers=2", **place)
    text = f"resumed at step {one} of {QUORUM_STEPS}, with 2 replicas in place of 3: all"
    assert text in log.read_text() and ", on 48 samples a step, before 48" in log.read_text()
    ended = cli(*arguments, runs=runs)
    assert ended.status == 0, ended.err
    text = f"resumed at step {other} of {QUORUM_STEPS}, with 3 replicas in place of 2: the new"
    assert text in ended.out
    back = 2 * one + 3 * (other - one)
    state = read_state(place["folder"], QUORUM_STEPS, 0)
    assert state["stretches"] == [[0, 3], [2 * one, 2], [back, 3]]
    assert state["draws"] == back + 2 * (QUORUM_STEPS - other)
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
                ("co2_keep", ("co2_keep.fragments=2",), "its fragments meet amid .* fragments=1$"),
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
def test_what_cannot_have_a_quorum_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(*arguments, runs=tmp_path / "runs")
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


@pytest.mark.parametrize("strategy", grid(("ddp", "zero1", "zero2", "zero3"), "zero2".__eq__))
def test_replicas_that_lose_nobody_are_the_same_run(tmp_path: Path, strategy: str) -> None:
    assert_elastic_is_the_same(tmp_path, *PAIRS, *of(strategy))
