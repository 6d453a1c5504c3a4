"""Replicas, of one worker or of several, are lost and come back: the others train on, and repeat no
step. One that is slow makes fewer steps; a global batch stays as replicas come and go. What cannot
be elastic is refused: tests/cli/test_bad_input.py."""

import math
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from co2.errors import PREEMPTED, ConfigError
from co2.record.files import whole_lines
from co2.record.lock import NAME
from co2.train import state_file
from recipes.runs.ledger import doubled_and_left_out
from recipes.runs.processes import is_running, process, running
from tests.cli.harness import (
    LIMIT_S,
    Process,
    Run,
    assert_same_run,
    assert_same_weights,
    cli,
    command,
    configured,
    folder_of,
    in_a_session,
    interrupted,
    kill_session,
    metrics,
    pooled,
    saved_steps,
    small,
    story,
    summary,
    trained,
    until,
    weights,
    workers,
    workers_killed,
)
from tests.cli.test_checkpoint import held
from tests.grids import grid
from tests.workers import Pool

STEPS, TAU, BATCH = 120, 6, 16
FEW = 60
"""Steps where little is to happen."""
EVERY = ("train.eval_every=30", "log.every=1", "checkpoint.every=0", f"train.batch_size={BATCH}")
COME_AND_GO = ("launch.elastic=true", "launch.silent_s=20")
SLOW = "toy.delay_s=0.01"
SHARED = (f"train.steps={STEPS}", *EVERY)
ELASTIC = ("launch.workers=3", *SHARED, *COME_AND_GO)
OF_THREE = ("launch.workers=3", f"train.steps={FEW}", *EVERY, *COME_AND_GO)
PAIRS = ("mesh.replica_size=2", f"train.steps={FEW}", *EVERY)
ELASTIC_PAIRS = ("launch.workers=4", *PAIRS, *COME_AND_GO)
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


def of(strategy: str) -> tuple[str, ...]:
    return (f"mesh.strategy={strategy}", *words("co2"))


def disturbed(
    tmp_path: Path, *arguments: str, at: int, victims: tuple[int, ...], number: int, status: int = 0
) -> Run:
    """A run whose victims get a signal after a step."""

    def act(run: Process) -> None:
        pids = workers(run)
        for victim in victims:
            os.kill(pids[victim], number)

    when = {"when": trained(at), "act": act, "status": status}
    return interrupted(*arguments, runs=tmp_path / "runs", **when)


def changes(folder: Path) -> list[dict[str, Any]]:
    return metrics(folder, "members")


def assert_no_step_is_missing(folder: Path, steps: int = STEPS) -> None:
    assert [line["step"] for line in metrics(folder, "train")] == list(range(1, steps + 1))
    assert [line["step"] for line in metrics(folder, "eval")] == list(range(30, steps + 1, 30))


def assert_good(run: Run, steps: int) -> list[dict[str, Any]]:
    """Every step once, numbers that are finite, and nothing said in more than a line."""
    assert "Traceback" not in run.out + run.err, run
    assert_no_step_is_missing(run.folder, steps)
    assert math.isfinite(summary(run.folder)["final"]["loss"])
    assert all(value.isfinite().all() for value in weights(run.folder).values())
    return changes(run.folder)


SAME = [
    (3, (*SHARED, *words("co2_keep"))),
    (3, (*SHARED, *words("co2_keep in fragments"))),
    *((4, (*PAIRS, *of(strategy))) for strategy in ("ddp", "zero1", "zero2", "zero3")),
]


def assert_elastic_is_the_same(
    pool: Pool, tmp_path: Path, world: int, *arguments: str
) -> tuple[Path, Path]:
    """A run that loses nobody, and the same that is not elastic. Returns their folders."""
    plain = pooled(pool, world, *arguments, runs=tmp_path / "plain").folder
    number = f"launch.workers={world}"
    other = cli(*arguments, number, *COME_AND_GO, runs=tmp_path / "elastic").folder
    assert_same_run(plain, other)
    return plain, other


@pytest.mark.parametrize(
    ("world", "arguments"), grid(SAME, lambda case: re.search("co2_keep|zero2", str(case)))
)
def test_a_run_that_loses_nobody_is_the_same_run(
    workers: Pool, tmp_path: Path, world: int, arguments: tuple[str, ...]
) -> None:
    few = ("train.steps=24", "train.eval_every=12")
    plain, elastic = assert_elastic_is_the_same(workers, tmp_path, world, *arguments, *few)
    name = f"{elastic.parent.name}-workers{world}"
    assert plain.parent.name == name, "it may go on with another number"


def test_experts_shared_by_two_workers_are_the_same_run(
    workers: Pool, tmp_path: Path, root: Path, text: Path
) -> None:
    arguments = (*small("moe", root, text), *PAIRS, *of("ep"), "train.steps=8", "co2.tau=3")
    more = ("train.batch_size=2", "train.eval_every=4")
    assert_elastic_is_the_same(workers, tmp_path, 4, *arguments, *more)


@pytest.mark.parametrize(
    ("method", "victims"),
    [("co2_keep", (2,)), ("desloc", (0, 2)), ("co2_keep in fragments", (1,))],
)
def test_those_that_are_left_go_on(tmp_path: Path, method: str, victims: tuple[int, ...]) -> None:
    """SIGKILL amid a round, also to the worker that writes, and to two at once. Under CO2:
    tests/cli/test_sinks.py."""
    ledger = tmp_path / "ledger"
    arguments = (*ELASTIC, SLOW, *words(method), "toy.samples=480", f"toy.ledger={ledger}")
    run = disturbed(tmp_path, *arguments, at=32, victims=victims, number=signal.SIGKILL)
    found = assert_good(run, STEPS)
    lost = {int(one) for change in found for one in change["lost"]}
    assert lost == set(victims) and found[-1]["members"] == sorted({0, 1, 2} - lost)
    doubled, left_out = doubled_and_left_out([ledger], samples=480)
    draws = [line[0] for path in ledger.glob("*.jsonl") for line in whole_lines(path)]
    assert len(draws) < 3 * STEPS, "the ledger is of all three"
    assert doubled == 0, "no sample is seen twice in an epoch"
    # None is left out but of these, and what fills no batch: a loss is noticed at the end of the
    # next round at most.
    assert left_out < (2 * TAU * len(victims) + 3) * BATCH
    told = summary(run.folder)
    assert told["members"] == found, "the summary says when and who"
    assert told["final"]["accuracy"] > 0.6
    assert all(f"worker {one} is lost (gone)" in run.out for one in victims)
    assert not (run.folder / NAME).exists(), "who has taken over held the folder, and freed it"


def test_one_that_stands_still_is_given_up_and_replaced(tmp_path: Path) -> None:
    """SIGSTOP for longer than `silent_s`; another worker is started in its place, and joins."""
    arguments = (*OF_THREE, *words("co2"), "launch.restarts=1", "launch.silent_s=5")
    told = {"at": 8, "victims": (1,), "number": signal.SIGSTOP}
    run = disturbed(tmp_path, *arguments, "toy.delay_s=0.1", **told)
    assert_no_step_is_missing(run.folder, FEW)
    (lost, joined) = changes(run.folder)
    assert list(lost["lost"]) == ["1"] and "silent for" in lost["lost"]["1"]
    assert joined["joined"] == [3] and joined["members"] == [0, 2, 3]
    assert joined["step"] % TAU == 0, "at a round's end"


def test_with_too_few_a_run_saves_and_ends_to_be_started_again(tmp_path: Path) -> None:
    arguments = (*ELASTIC, SLOW, *words("local_sgd"), "launch.min_replicas=2", "launch.wait_s=1")
    told = {"at": 32, "victims": (0, 1), "number": signal.SIGKILL, "status": PREEMPTED}
    run = disturbed(tmp_path, *arguments, **told)
    (step,) = saved_steps(run.folder)
    assert step >= 32 and f"step {step}: 1 replicas, fewer than launch.min_replicas=2" in run.out
    again = cli(*arguments, runs=run.runs)
    assert f"resumed at step {step} of {STEPS}" in again.out
    assert_no_step_is_missing(run.folder)


def test_a_run_that_has_made_its_last_step_waits_for_nobody(tmp_path: Path) -> None:
    """The others notice the loss in the mean at the end of the last round."""
    arguments = (*ELASTIC, SLOW, "method=local_sgd", f"local_sgd.tau={STEPS}")
    arguments = (*arguments, "launch.min_replicas=3", "launch.wait_s=1")
    run = disturbed(tmp_path, *arguments, at=95, victims=(1,), number=signal.SIGKILL)
    assert changes(run.folder)[-1]["step"] == STEPS - 1, "the mean of the last step"
    assert_no_step_is_missing(run.folder)


def test_told_to_stop_all_stop_at_the_same_step(workers: Pool, tmp_path: Path) -> None:
    arguments = (*ELASTIC, SLOW, *words("co2"))
    told = {"at": 20, "victims": (2,), "number": signal.SIGTERM, "status": PREEMPTED}
    folder = disturbed(tmp_path, *arguments, **told).folder
    (step,) = saved_steps(folder)
    assert step < STEPS, "also in the midst of a round"
    cli(*arguments, runs=tmp_path / "runs")
    undisturbed = pooled(workers, 3, *SHARED, *words("co2"), runs=tmp_path / "whole").folder
    assert story(folder) == story(undisturbed), "resumed by as many, it is the same run"
    assert_same_weights(folder, undisturbed)


def killed_after(step: int, *arguments: str, runs: Path) -> tuple[int, Run]:
    """A run whose workers are all killed once a step is saved; the last step that is."""
    saved = lambda folder: max(saved_steps(folder), default=0) >= step  # noqa: E731
    run = interrupted(*arguments, runs=runs, when=saved, act=workers_killed, status=None)
    assert run.status != 0
    return max(saved_steps(run.folder)), run


def test_resumed_with_another_replica(tmp_path: Path) -> None:
    arguments = (*PAIRS, *COME_AND_GO, *of("zero2"), "checkpoint.every=10", "toy.delay_s=0.02")
    step, run = killed_after(20, *arguments, "launch.workers=4", runs=tmp_path / "runs")
    ended = cli(*arguments, "launch.workers=6", runs=run.runs)
    assert f"resumed at step {step} of {FEW}" in ended.out
    assert_good(ended, FEW)
    assert summary(ended.folder)["workers"] == 6


def until_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "a worker outlives what started it"
        time.sleep(0.05)


def left_alone(
    tmp_path: Path, *more: str, server: bool, status: int, interpreter: bool = False
) -> str:
    """What a run says whose workers lose what started them: train.py itself, or the fork server.
    The workers end, and the same command goes on from a checkpoint."""

    def kill(run: Process) -> None:
        pids = workers(run)
        worker = process(pids[0])
        assert worker is not None
        os.kill(worker.parent if server else run.pid, signal.SIGKILL)
        run.wait(LIMIT_S)
        until_ended(pids)

    arguments = ("launch.workers=3", f"train.steps={FEW}", *EVERY, *words("co2"), *more)
    arguments = (*arguments, "checkpoint.every=10", "toy.delay_s=0.05")
    given = {"when": lambda folder: 20 in saved_steps(folder), "act": kill, "status": status}
    run = interrupted(*arguments, runs=tmp_path / "runs", interpreter=interpreter, **given)
    assert "Traceback" not in run.out
    assert "resumed at step" in cli(*arguments, runs=run.runs).out
    return run.out


@pytest.mark.slow  # new interpreters: a forked worker would hold the store's own connection
def test_workers_end_when_what_started_them_is_killed(tmp_path: Path) -> None:
    """The store in which they agree is gone with it."""
    ended = {"server": False, "status": -signal.SIGKILL, "interpreter": True}
    said = left_alone(tmp_path, *COME_AND_GO, **ended)
    assert said.count("what holds the store is gone; the same command goes on") == 3


@pytest.mark.parametrize(
    "more",
    grid(
        ["launch.elastic=true", "launch.elastic=true launch.restarts=1", ""],
        lambda more: "restarts" in more,
    ),
)
def test_without_the_fork_server_a_run_ends_to_be_started_again(tmp_path: Path, more: str) -> None:
    """It alone learns how workers end, so nobody can tell any more which of them train."""
    said = left_alone(tmp_path, *more.split(), server=True, status=PREEMPTED)
    assert said.endswith(
        "error: the fork server is gone; the same command goes on from the last checkpoint\n"
    )


def test_under_torchrun_it_is_refused(tmp_path: Path, variables: Callable) -> None:
    variables(RANK="0", WORLD_SIZE="2")
    with pytest.raises(ConfigError, match="starts the workers of an elastic run itself"):
        configured("launch.elastic=true", "method=co2", runs=tmp_path / "runs")


@pytest.mark.parametrize(
    ("strategy", "victim", "number"),
    grid([("zero2", 3, signal.SIGKILL), ("zero3", 2, signal.SIGSTOP)], lambda one: "zero2" in one),
)
def test_a_worker_costs_its_replica(
    tmp_path: Path, strategy: str, victim: int, number: signal.Signals
) -> None:
    """Its sibling does not wait for it, and the other replica goes on."""
    arguments = (*ELASTIC_PAIRS, *of(strategy), "toy.delay_s=0.02", "launch.silent_s=5")
    run = disturbed(tmp_path, *arguments, at=10, victims=(victim,), number=number)
    (change,) = assert_good(run, FEW)
    lost = {2 * (victim // 2), 2 * (victim // 2) + 1}
    assert {int(one) for one in change["lost"]} == lost
    assert set(change["members"]) == {0, 1, 2, 3} - lost


def test_another_replica_comes_as_a_whole(tmp_path: Path) -> None:
    """In place of the one that writes for the run. Its state is that of the first one: what must be
    equal on all is compared in every evaluation, bit for bit."""
    arguments = (*ELASTIC_PAIRS, *of("zero2"), "toy.delay_s=0.1", "launch.restarts=1")
    run = disturbed(tmp_path, *arguments, at=8, victims=(1,), number=signal.SIGKILL)
    lost, joined = assert_good(run, FEW)
    assert {int(one) for one in lost["lost"]} == {0, 1}
    assert joined["joined"] == [4, 5] and joined["members"] == [2, 3, 4, 5]
    assert joined["step"] < 54, "it has a part in a mean"


LATE = ("toy.delay_s=0.03", "toy.late_s=0.09")
"""The last of the workers needs four times as long for a step."""


def test_a_run_in_which_nobody_is_slow_is_the_same_run(workers: Pool, tmp_path: Path) -> None:
    """With a quorum of all no replica ever is."""
    few = (f"train.steps={FEW}", *EVERY, *words("co2"))
    without = pooled(workers, 3, *few, runs=tmp_path / "without").folder
    more = ("launch.workers=3", *COME_AND_GO, "launch.quorum=3")
    with_quorum = cli(*few, *more, runs=tmp_path / "with").folder
    assert_same_run(with_quorum, without)
    assert summary(with_quorum)["steps_made"] == [FEW] * 3 and summary(without)["steps_made"] == []


def test_one_slow_replica_does_not_slow_the_others(tmp_path: Path) -> None:
    """It makes fewer steps: so few that a busy machine, which slows all of them alike, leaves it
    behind. The first round has to be measured."""
    slow_one = ("toy.delay_s=0.05", "toy.late_s=0.35", "launch.quorum=2")
    run = cli(*OF_THREE, *words("local_sgd"), *slow_one, runs=tmp_path / "runs")
    *others, slow = summary(run.folder)["steps_made"]
    assert others == [FEW, FEW] and FEW // TAU <= slow < 0.6 * FEW
    assert_no_step_is_missing(run.folder, FEW)
    assert "worker 2 makes " in run.out and f"of {TAU} steps in a round" in run.out
    first, *_ = metrics(run.folder, "steps")
    assert first["fewer"] == [2] and first["steps"]["2"] < TAU == first["steps"]["0"]
    assert first["step"] % TAU == 0, "at a round's end"


def test_told_to_stop_a_slow_replica_goes_on_as_slow(tmp_path: Path) -> None:
    arguments = (*OF_THREE, *words("local_sgd"), *LATE, "launch.quorum=2")
    told = {"at": 20, "victims": (1,), "number": signal.SIGTERM, "status": PREEMPTED}
    folder = disturbed(tmp_path, *arguments, **told).folder
    (step,) = saved_steps(folder)
    states = [read_state(folder, step, rank) for rank in range(3)]
    assert all(state["steps_in_round"] == states[0]["steps_in_round"] for state in states)
    assert states[0]["steps_in_round"][2] < TAU
    assert [state["behind"] > 0 for state in states] == [False, False, True]
    made = step - states[2]["totals"]["passed_over"]
    assert states[2]["draws"] - states[2]["behind"] == made, "every sample that it drew was used"
    cli(*arguments, runs=tmp_path / "runs")
    assert_no_step_is_missing(folder, FEW)
    *others, slow = summary(folder)["steps_made"]
    assert others == [FEW, FEW] and made < slow < FEW - (step - made)


def read_state(folder: Path, step: int, rank: int) -> dict[str, Any]:
    return state_file.read(held(folder / f"checkpoints/step_{step}", rank))


KEPT = (*OF_THREE, *words("co2"), "train.global_batch=48", "train.batch_size=8")
KEPT += ("toy.delay_s=0.02",)


def test_those_that_are_left_take_over_the_samples_of_a_lost_one(tmp_path: Path) -> None:
    """Three replicas of two micro-batches become two of three."""
    arguments = (*KEPT, "checkpoint.every=60")
    run = disturbed(tmp_path, *arguments, at=14, victims=(1,), number=signal.SIGKILL)
    assert_no_step_is_missing(run.folder, FEW)
    assert "2 train on, on 48 samples a step, before 48" in run.out
    state = read_state(run.folder, FEW, 0)
    (_, three), (at, two) = state["stretches"]
    assert (three, two) == (3, 2) and at % 2 == 0
    assert state["draws"] == at + 3 * (FEW - at // 2)


def test_resumed_by_fewer_and_by_as_many_as_before(tmp_path: Path) -> None:
    arguments, runs = (*KEPT, "checkpoint.every=6", "tag=one"), tmp_path / "runs"
    one, _ = killed_after(12, *arguments, runs=runs)
    other, run = killed_after(one + 12, *arguments, "launch.workers=2", runs=runs)
    text = f"resumed at step {one} of {FEW}, with 2 replicas in place of 3: all"
    assert text in run.out and ", on 48 samples a step, before 48" in run.out
    ended = cli(*arguments, runs=runs)
    text = f"resumed at step {other} of {FEW}, with 3 replicas in place of 2: the new"
    assert text in ended.out
    back = 2 * one + 3 * (other - one)
    state = read_state(ended.folder, FEW, 0)
    assert state["stretches"] == [[0, 3], [2 * one, 2], [back, 3]]
    assert state["draws"] == back + 2 * (FEW - other)
    assert_good(ended, FEW)
    assert summary(ended.folder)["workers"] == 3


@pytest.mark.slow  # five interpreters start
def test_torchrun_starts_all_workers_again(tmp_path: Path) -> None:
    """Without launch.elastic: they go on from the last checkpoint."""
    runs, log = tmp_path / "runs", tmp_path / "log"
    arguments = (*words("co2"), f"train.steps={STEPS}", "log.every=1", "checkpoint.every=20")
    arguments = (*arguments, "toy.delay_s=0.02")
    python, *program = command(*arguments, runs=runs)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    folder = folder_of(*arguments, runs=runs)
    run = in_a_session([python, *torchrun, "--max-restarts=1", *program], tmp_path, log)
    try:
        until(lambda: 40 in saved_steps(folder), run)
        started = sorted(one.pid for one in running() if one.parent == run.pid)
        os.kill(started[1], signal.SIGKILL)
        assert run.wait(LIMIT_S) == 0, log.read_text()
    finally:
        kill_session(run)
    assert "resumed at step" in log.read_text()
    assert [line["step"] for line in metrics(folder, "train")] == list(range(1, STEPS + 1))
