"""A run that is told to stop by a signal: all workers stop after the same step, soon, and save."""

import itertools
import os
import re
import signal
import subprocess
import time
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
    LINGER_S,
    STORY,
    Run,
    alive,
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
from tests.cli.test_disturbed import resumed_at
from tests.grids import grid
from tests.workers import Pool, WorkerError, replicas

SLOW = "toy.delay_s=0.03"


def last_step(folder: Path) -> int:
    lines = metrics(folder)
    return lines[-1]["step"] if lines else 0


def test_told_to_stop(tmp_path: Path, spawned: Run) -> None:
    """SIGTERM, SIGUSR1 and SIGHUP to train.py; there are no other checkpoints than theirs."""
    arguments, runs = (*STORY, SLOW, "checkpoint.every=0"), tmp_path / "runs"
    folder, log = folder_of(*arguments, runs=runs), tmp_path / "log"
    saved: list[int] = []
    for number, step in ((signal.SIGTERM, 5), (signal.SIGUSR1, 20), (signal.SIGHUP, 35)):
        with started(*arguments, runs=runs, log=log) as process:
            trained = max([step, *(one + 1 for one in saved)])  # by this process
            until(lambda s=trained: last_step(folder) >= s, process)
            os.kill(process.pid, number)
            assert process.wait(timeout=LIMIT_S) == PREEMPTED == 75
        assert resumed_at(log.read_text()) == saved[-1:]
        (newest,) = set(saved_steps(folder)) - set(saved)
        assert step < newest < 60
        assert last_step(folder) == newest, "nothing is trained that is not saved"
        assert f"stopped and saved at step {newest};" in log.read_text()
        assert "Traceback" not in log.read_text()
        assert not (folder / "summary.json").exists()
        saved.append(newest)
    ended = cli(*arguments, runs=runs)
    assert ended.status == 0, ended.err
    assert resumed_at(ended.out) == saved[-1:]
    assert saved_steps(folder) == saved[-2:]
    assert_same_run(folder, spawned.folder)


@pytest.mark.parametrize("elastic", ["false", "true"])
@pytest.mark.parametrize("number", grid(processes.STOP_SIGNALS, signal.SIGTERM.__eq__))
def test_all_processes_are_told_to_stop(
    tmp_path: Path, number: signal.Signals, elastic: str
) -> None:
    """As timeout, systemd, scancel and a terminal do it: also those that load batches."""
    arguments = (*STORY, SLOW, "checkpoint.every=0", "data.workers=2", f"launch.elastic={elastic}")
    runs, log = tmp_path / "runs", tmp_path / "log"
    folder = folder_of(*arguments, runs=runs)
    with started(*arguments, runs=runs, log=log) as process:
        until(lambda: last_step(folder) >= 5, process)
        os.killpg(process.pid, number)
        assert process.wait(timeout=LIMIT_S) == PREEMPTED
    assert len(saved_steps(folder)) == 1 and "Traceback" not in log.read_text()


def test_stopping_does_not_take_a_round(tmp_path: Path) -> None:
    """A machine that is taken away waits for minutes at most, and a round may last longer."""
    arguments = (
        *("method=diloco", "diloco.tau=200", "launch.workers=2", "train.steps=600", "log.every=1"),
        *("checkpoint.every=0", "toy.delay_s=0.02"),
    )
    runs, log = tmp_path / "runs", tmp_path / "log"
    folder = folder_of(*arguments, runs=runs)
    with started(*arguments, runs=runs, log=log) as process:
        until(lambda: last_step(folder) >= 5, process)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=LIMIT_S) == PREEMPTED
    (newest,) = saved_steps(folder)
    assert 5 <= newest < 200, "in the first round"


def test_a_worker_that_does_not_answer(tmp_path: Path) -> None:
    """A run that is told to stop waits for it, and then says for how long."""
    arguments = (
        "method=co2",
        "co2.tau=2000",
        "launch.workers=2",
        "train.steps=4000",
        "log.every=1",
    )
    arguments += ("checkpoint.grace_s=0", "toy.delay_s=0.02", "train.eval_every=4000")
    runs, log = tmp_path / "runs", tmp_path / "log"
    folder = folder_of(*arguments, runs=runs)
    with started(*arguments, runs=runs, log=log) as process:
        until(lambda: last_step(folder) >= 5, process)
        os.kill(workers(process)[-1], signal.SIGSTOP)
        os.kill(process.pid, signal.SIGTERM)
        until(lambda: "error" in log.read_text(), process)
    (line,) = [line for line in log.read_text().splitlines() if "error" in line]
    assert re.match(
        "error: worker . has lost another worker: .* checkpoint.grace_s=0 seconds", line
    )


def test_put_aside_for_a_moment(tmp_path: Path) -> None:
    """Ctrl-Z and fg tell nobody to stop, and what is told afterwards is heard."""
    arguments, runs, log = (*STORY, "toy.delay_s=0.1"), tmp_path / "runs", tmp_path / "log"
    folder = folder_of(*arguments, runs=runs)
    with started(*arguments, runs=runs, log=log) as process:
        until(lambda: last_step(folder) >= 1, process)
        for _ in range(3):
            os.kill(process.pid, signal.SIGSTOP)
            until(lambda: state(process.pid) == "T", process)
            os.kill(process.pid, signal.SIGCONT)
            seen = last_step(folder)
            until(lambda s=seen: last_step(folder) > s, process)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=LIMIT_S) == PREEMPTED
    assert "Traceback" not in log.read_text()


def state(pid: int) -> str:
    """Of a process: T while it is stopped."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return text.rpartition(") ")[2][0]


def test_told_before_there_are_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker is there to be told, and still the run does not go on as if nothing were. Nor does
    it end at once because a thread of NumPy's BLAS gets the signal."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    arguments, runs, log = ("train.steps=1000",), tmp_path / "runs", tmp_path / "log"
    with started(*arguments, runs=runs, log=log, interpreter=True) as process:
        until(lambda: catches(process.pid, signal.SIGTERM), process)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=LIMIT_S) == PREEMPTED
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
    runs, log = tmp_path / "runs", tmp_path / "log"
    arguments = (*STORY, "toy.delay_s=0.1", "launch.workers=3")
    folder = folder_of(*arguments, runs=runs)
    with started(*arguments, runs=runs, log=log) as process:
        until(lambda: last_step(folder) >= 3, process)
        os.kill(workers(process)[-1], signal.SIGKILL)
        status = process.wait(timeout=LIMIT_S)
        assert status == 128 + signal.SIGKILL
        # Python's helper process ends when it sees that all whom it helped are gone.
        deadline = time.monotonic() + LINGER_S
        while alive(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not alive(process.pid)
    told = [line for line in log.read_text().splitlines() if "error" in line]
    (line,) = told
    why = "(: another replica has gone .*|: it has ended)?"
    assert re.fullmatch(f"error: worker [012] has lost another worker{why}", line)
    assert "Traceback" not in log.read_text()
    assert not (folder / "summary.json").exists()


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


def vote(rank: int, world: int, told: dict[int, int], steps: int) -> tuple[int | None, bool]:
    """The step after which this worker stops, where worker r is told in its step told[r]; and
    whether the signal's former handler is back."""
    before = signal.getsignal(signal.SIGUSR1)
    store, stopped = dist.distributed_c10d._get_default_store(), None
    shared = store.clone() if world > 1 else None
    with (
        patch.object(stop_module, "LOOK_S", 0.001),
        StopVote(shared, rank, lambda: range(world), [signal.SIGUSR1]) as stop,
    ):
        for step in range(1, steps + 1):
            if told.get(rank) == step:
                os.kill(os.getpid(), signal.SIGUSR1)
            if step < steps and stop(step):
                stopped = step
                break
            if step < steps:
                dist.barrier()
    return stopped, signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize("told", [{0: 4}, {1: 4}, {0: 40, 1: 3, 2: 3}], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_all_stop_after_the_same_step(workers: Pool, world: int, told: dict[int, int]) -> None:
    ends = workers.run(vote, world, told, 100_000)
    (step,) = {step for step, _ in ends}
    assert step is not None and step >= min(told.values()) and all(back for _, back in ends)


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
    store = dist.distributed_c10d._get_default_store().clone()
    with (
        patch.object(StopVote, "_told", side_effect=KeyError("unexpected")),
        StopVote(store, rank, lambda: range(world), [signal.SIGUSR1]) as stop,
    ):
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
    store = dist.distributed_c10d._get_default_store()
    with (
        patch.object(stop_module, "LOOK_S", 0.001),
        StopVote(store.clone(), rank, lambda: range(world), [signal.SIGUSR1]) as stop,
    ):
        for step in itertools.count(1):
            if rank == 0 and step == 1:
                store.wait(["ahead"])
            if rank == 0 and step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
                while stop._answer is None:
                    time.sleep(0.001)
            if step == AHEAD:
                store.set("ahead", "1")
            if step >= AHEAD:
                dist.barrier()
            if stop(step):
                break
    assert step == AHEAD


def vote_with_one_paused(rank: int, world: int, grace_s: float, paused_s: float) -> object:
    """Worker 0 is told to stop; worker 1 answers after so many seconds on the clock of worker 0.
    Returns the step after which each stops, or the error."""
    store, now = dist.distributed_c10d._get_default_store().clone(), [0.0]

    def sleep(_: float) -> None:
        now[0] = min(now[0] + 1, paused_s)
        if now[0] == paused_s:
            store.set("goes on", "1")

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: now[0])
    if rank == 1:
        store.wait(["goes on"])
    with (
        patch.object(stop_module, "LOOK_S", 0.001),
        patch.object(stop_module, "time", clock if rank == 0 else time),
        StopVote(
            store.clone(), rank, lambda: range(world), [signal.SIGUSR1], grace_s=grace_s
        ) as stop,
    ):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        for step in itertools.count(1):
            while rank == 0 and stop._answer is None:
                time.sleep(0.001)
            try:
                if stop(step):
                    return step
            except WorkerLost as error:
                store.set("goes on", "1")
                return str(error)
    raise AssertionError("it goes on until it stops")


def test_a_paused_worker_is_waited_for(workers: Pool) -> None:
    """As long as the machine is there: to give up loses all that was not saved."""
    first, other = workers.run(vote_with_one_paused, 2, 60.0, 59.0)
    assert first == other


def test_a_paused_worker_is_not_waited_for_for_ever(workers: Pool) -> None:
    found, _ = workers.run(vote_with_one_paused, 2, 60.0, 62.0)
    assert found == "it has not said in checkpoint.grace_s=60 seconds after which step it can stop"
