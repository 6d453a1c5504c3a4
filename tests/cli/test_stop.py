"""A run that is told to stop by a signal: all workers stop after the same step, soon, and save."""

import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from co2.comm.mesh import Mesh
from co2.config import Config
from co2.errors import PREEMPTED, WorkerLost
from co2.start import processes
from co2.start.launch import _guarded
from co2.train import stop as stop_module
from co2.train.stop import StopVote, voted
from tests.cli.harness import (
    LIMIT_S,
    STORY,
    Process,
    Run,
    assert_same_run,
    cli,
    configured,
    folder_of,
    interrupted,
    last_step,
    saved_steps,
    signalled,
    started,
    trained,
    until,
    until_all_have_ended,
    workers,
)
from tests.cli.test_disturbed import resumed_at
from tests.grids import grid
from tests.workers import Pool, WorkerError, everybody, replicas

SLOW = "toy.delay_s=0.03"
NOT_SAVED = "checkpoint.every=0"
"""There are no other checkpoints than those of being told to stop."""


def test_told_to_stop(tmp_path: Path, spawned: Run) -> None:
    """SIGTERM, SIGUSR1 and SIGHUP to train.py. Ctrl-Z and fg before tell nobody to stop."""
    arguments, runs = (*STORY, SLOW, NOT_SAVED), tmp_path / "runs"
    folder = folder_of(*arguments, runs=runs)
    saved: list[int] = []

    def put_aside(process: Process) -> None:
        for _ in range(2):
            os.kill(process.pid, signal.SIGSTOP)
            until(lambda: state(process.pid) == "T", process)
            os.kill(process.pid, signal.SIGCONT)
            seen = last_step(folder)
            until(lambda s=seen: last_step(folder) > s, process)
        os.kill(process.pid, signal.SIGTERM)

    acts = (put_aside, signalled(signal.SIGUSR1), signalled(signal.SIGHUP))
    for act, step in zip(acts, (5, 20, 35), strict=True):
        when = trained(max([step, *(one + 1 for one in saved)]))  # by this process
        run = interrupted(*arguments, runs=runs, when=when, act=act, status=PREEMPTED)
        assert resumed_at(run.out) == saved[-1:]
        (newest,) = set(saved_steps(run.folder)) - set(saved)
        assert step < newest < 60
        assert last_step(run.folder) == newest, "nothing is trained that is not saved"
        assert f"stopped and saved at step {newest};" in run.out and "Traceback" not in run.out
        assert not (run.folder / "summary.json").exists()
        saved.append(newest)
    ended = cli(*arguments, runs=runs)
    assert resumed_at(ended.out) == saved[-1:]
    assert saved_steps(ended.folder) == saved[-2:]
    assert_same_run(ended.folder, spawned.folder)


def state(pid: int) -> str:
    """Of a process: T while it is stopped."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return text.rpartition(") ")[2][0]


@pytest.mark.parametrize("elastic", ["false", "true"])
@pytest.mark.parametrize("number", grid(processes.STOP_SIGNALS, signal.SIGTERM.__eq__))
def test_all_processes_are_told_to_stop(
    tmp_path: Path, number: signal.Signals, elastic: str
) -> None:
    """As timeout, systemd, scancel and a terminal do it: also those that load batches."""
    arguments = (*STORY, SLOW, NOT_SAVED, "data.workers=2", f"launch.elastic={elastic}")
    told = {"act": lambda process: os.killpg(process.pid, number), "status": PREEMPTED}
    run = interrupted(*arguments, runs=tmp_path / "runs", when=trained(5), **told)
    assert len(saved_steps(run.folder)) == 1 and "Traceback" not in run.out


LONG_ROUND = ("method=diloco", "diloco.tau=2000", "train.steps=4000", "train.eval_every=4000")
LONG_ROUND += ("launch.workers=2", "log.every=1", "toy.delay_s=0.02", NOT_SAVED)


def test_stopping_does_not_take_a_round(tmp_path: Path) -> None:
    """A machine that is taken away waits for minutes at most, and a round may last longer."""
    told = {"act": signalled(signal.SIGTERM), "status": PREEMPTED}
    run = interrupted(*LONG_ROUND, runs=tmp_path / "runs", when=trained(5), **told)
    (newest,) = saved_steps(run.folder)
    assert 5 <= newest < 200, "in the first round"


def test_a_worker_that_does_not_answer(tmp_path: Path) -> None:
    """A run that is told to stop waits for it, and then says for how long."""
    arguments, runs, log = (
        (*LONG_ROUND, "checkpoint.grace_s=0"),
        tmp_path / "runs",
        tmp_path / "log",
    )
    folder = folder_of(*arguments, runs=runs)
    with started(*arguments, runs=runs, log=log) as process:
        until(lambda: last_step(folder) >= 5, process)
        os.kill(workers(process)[-1], signal.SIGSTOP)
        os.kill(process.pid, signal.SIGTERM)
        until(lambda: "error" in log.read_text(), process)
    (line,) = [line for line in log.read_text().splitlines() if "error" in line]
    says = "error: worker . has lost another worker: .* checkpoint.grace_s=0 seconds"
    assert re.match(says, line)


def test_told_before_there_are_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker is there to be told, and still the run does not go on as if nothing were. Nor does
    it end at once because a thread of NumPy's BLAS gets the signal."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    arguments, runs, log = ("train.steps=1000",), tmp_path / "runs", tmp_path / "log"
    with started(*arguments, runs=runs, log=log, interpreter=True) as process:
        until(lambda: catches(process.pid, signal.SIGTERM), process)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(LIMIT_S) == PREEMPTED
    assert not (folder_of(*arguments, runs=runs) / "summary.json").exists()


def catches(pid: int, number: int) -> bool:
    """Whether a process would not simply end by a signal: it is caught, or kept for later.

    Seen ten times in a row, because Python keeps all signals for the moment in which it starts any
    process.
    """
    for _ in range(10):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        told = [line.split()[1] for line in lines if line.startswith(("SigCgt", "SigBlk"))]
        if not any(int(mask, 16) >> (number - 1) & 1 for mask in told):
            return False
        time.sleep(0.02)
    return True


def test_one_worker_is_killed(tmp_path: Path) -> None:
    """The others stop by themselves, and the status says what happened."""

    def kill(process: Process) -> None:
        os.kill(workers(process)[-1], signal.SIGKILL)
        process.wait(LIMIT_S)
        until_all_have_ended(process)

    told = {"when": trained(3), "act": kill, "status": 128 + signal.SIGKILL}
    words = (*STORY, "toy.delay_s=0.1", "launch.workers=3")
    run = interrupted(*words, runs=tmp_path / "runs", **told)
    (line,) = [line for line in run.out.splitlines() if "error" in line]
    why = "(: another replica has gone .*|: it has ended)?"
    assert re.fullmatch(f"error: worker [012] has lost another worker{why}", line)
    assert "Traceback" not in run.out and not (run.folder / "summary.json").exists()


def loses_its_peer(rank: int, world: int, runs: str) -> int:
    """Worker 1 loses another one while a collective is under way that worker 0 never joins."""

    def worker(_: Config) -> None:
        if rank == 1:
            dist.all_reduce(torch.zeros(1), async_op=True)
            raise RuntimeError("Connection closed by peer")
        time.sleep(LIMIT_S)

    with patch("co2.start.launch._PEER_S", 0.0):
        return _guarded(worker, configured(*STORY, runs=Path(runs)), rank)


def test_who_has_lost_a_peer_waits_for_nothing(workers: Pool, tmp_path: Path) -> None:
    """Else the workers of a job that torchrun started waited for each other, and were killed after
    half a minute."""
    with pytest.raises(WorkerError, match="rank 1 died"):
        workers.run(loses_its_peer, 2, str(tmp_path))


@contextmanager
def voting(rank: int, world: int, **more: float) -> Iterator[StopVote]:
    """The vote of a worker, which looks often."""
    with (
        patch.object(stop_module, "LOOK_S", 0.001),
        StopVote(store().clone(), rank, lambda: range(world), [signal.SIGUSR1], **more) as stop,
    ):
        yield stop


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


@replicas()
@pytest.mark.parametrize("told", [{0: 4}, {1: 4}, {0: 40, 1: 3, 2: 3}], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_all_stop_after_the_same_step(rank: int, world: int, told: dict[int, int]) -> None:
    """Worker r is told in its step told[r]. Afterwards the signal's former handler is back."""
    before = signal.getsignal(signal.SIGUSR1)
    with voting(rank, world) as stop:
        for step in range(1, 100_000):
            if told.get(rank) == step:
                os.kill(os.getpid(), signal.SIGUSR1)
            if stop(step):
                break
            dist.barrier()
        else:
            pytest.fail("nobody has stopped")
    assert set(everybody(step)) == {step} and step >= min(told.values())
    assert signal.getsignal(signal.SIGUSR1) is before


@replicas(2)
def test_a_later_run_of_the_same_workers_stops_too(rank: int, world: int) -> None:
    """As in a sweep by srun. What they answered at the end of the run before counts no more."""
    mesh, last = Mesh.world(), 20
    for told in (None, 4, None, 7):
        with (
            patch.object(stop_module, "LOOK_S", 0.001),
            voted(None, mesh, [signal.SIGUSR1], 0, LIMIT_S) as stop,
        ):
            for step in range(1, 1000 if told else last):
                if rank == 1 and told == step:
                    os.kill(os.getpid(), signal.SIGUSR1)
                if stop(step):
                    break
                dist.barrier()
        assert (step >= told) if told else (step == last - 1), "nobody was told"
        assert step < 999


@replicas(2)
def test_a_worker_ends_without_the_thread_that_answers(rank: int, world: int) -> None:
    """The others would wait for its answer, in an elastic run for ever."""
    broken = patch.object(StopVote, "_told", side_effect=KeyError("unexpected"))
    with broken, voting(rank, world) as stop:
        stop._thread.join()
        with pytest.raises(KeyError, match="unexpected"):
            stop(1)


def test_what_a_worker_starts_does_not_end_by_signals() -> None:
    """Such as a compiler: a signal to all processes of a run does not disturb the last step."""
    kill = ["sh", "-c", "kill $$; echo it goes on"]
    with StopVote(None, 0, tuple, [signal.SIGTERM]):
        assert subprocess.run(kill, capture_output=True).stdout == b"it goes on\n"


AHEAD = 5


@replicas(2)
def test_all_stop_after_the_step_of_the_one_that_is_furthest(rank: int, world: int) -> None:
    """Worker 1 is ahead, and waits in its step `AHEAD` for what worker 0 begins in that step.
    Worker 0 is told in its second. Nobody is left waiting."""
    with voting(rank, world) as stop:
        for step in itertools.count(1):
            if rank == 0 and step == 1:
                store().wait(["ahead"])
            if rank == 0 and step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
                while stop._answer is None:
                    time.sleep(0.001)
            if step == AHEAD:
                store().set("ahead", "1")
            if step >= AHEAD:
                dist.barrier()
            if stop(step):
                break
    assert step == AHEAD


@replicas(2)
@pytest.mark.parametrize("paused_s", [59.0, 62.0])
def test_a_paused_worker_is_waited_for_but_not_for_ever(
    rank: int, world: int, paused_s: float
) -> None:
    """Worker 0 is told to stop; worker 1 answers after so many seconds on the clock of worker 0. To
    give up loses all that was not saved."""
    now = [0.0]

    def sleep(_: float) -> None:
        now[0] = min(now[0] + 1, paused_s)
        if now[0] == paused_s:
            other.set("goes on", "1")

    clock, other = SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]), store().clone()
    if rank == 1:
        other.wait(["goes on"])
    with (
        patch.object(stop_module, "time", clock if rank == 0 else time),
        voting(rank, world, grace_s=60.0) as stop,
    ):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        for step in itertools.count(1):
            while rank == 0 and stop._answer is None:
                time.sleep(0.001)
            found: int | str = step
            try:
                if stop(step):
                    break
            except WorkerLost as error:
                other.set("goes on", "1")
                found = str(error)
                break
    gone = "it has not said in checkpoint.grace_s=60 seconds after which step it can stop"
    first, second = everybody(found)
    assert first == (second if paused_s < 60 else gone)
