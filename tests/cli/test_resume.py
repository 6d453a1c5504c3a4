"""A run that was killed, stopped, or met a bad disk ends as one that nothing happened to."""

import contextlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import train
from co2.config import Config
from co2.errors import DIVERGED, PREEMPTED, REFUSED, ConfigError
from co2.methods import METHODS
from co2.record.folder import check_folder, read_summary
from co2.record.provenance import of_all_starts
from co2.start import processes
from co2.start.launch import _guarded
from co2.train import checkpoint
from co2.train.checkpoint import Checkpoints
from tasks.toy import Toy
from tests.cli.harness import (
    LIMIT_S,
    LINGER_S,
    STORY,
    Run,
    alive,
    assert_same_run,
    assert_same_weights,
    cli,
    configured,
    contents,
    folder_of,
    kill_session,
    metrics,
    pooled,
    saved_steps,
    started,
    stopped_after,
    story,
    until,
    workers,
)
from tests.cli.test_checkpoint import DAMAGES, FULL, damage, full_disk, part
from tests.grids import grid
from tests.methods.driver import overrides
from tests.workers import Pool, WorkerError

KILLS = 10
SLOW = "toy.delay_s=0.03"


def last_step(folder: Path) -> int:
    lines = metrics(folder)
    return lines[-1]["step"] if lines else 0


def resumed_at(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"^resumed at step (\d+)", text, re.MULTILINE)]


def test_killed_ten_times(tmp_path: Path, spawned: Run) -> None:
    """SIGKILL to all workers and to what started them, in steps drawn at random."""
    arguments, runs = (*STORY, SLOW, "checkpoint.every=2"), tmp_path / "runs"
    folder, log = folder_of(*arguments, runs=runs), tmp_path / "log"
    begun = []
    for step in sorted(random.Random(2401).sample(range(3, 58), KILLS)):
        before = inode(folder / "metrics.jsonl")
        with started(*arguments, runs=runs, log=log) as process:
            until(
                # Lines of the attempt before do not count: resuming writes the file anew.
                lambda s=step, b=before: (
                    last_step(folder) >= s and inode(folder / "metrics.jsonl") != b
                ),
                process,
            )
            kill_session(process)
            assert process.wait() == -signal.SIGKILL
        begun.append((resumed_at(log.read_text()) or [0])[0])
        assert not (folder / "summary.json").exists()
    ended = cli(*arguments, runs=runs)
    assert ended.status == 0, ended.err
    assert begun[0] == 0 and begun == sorted(begun)
    assert len(set(begun)) >= KILLS - 3, "attempts go on from each other"
    assert len(resumed_at(ended.out)) == 1
    assert_same_run(folder, spawned.folder)
    told = json.loads((folder / "summary.json").read_text())
    whole = json.loads((spawned.folder / "summary.json").read_text())
    assert told["bytes_per_step"] == whole["bytes_per_step"], "totals go on, too"


def inode(path: Path) -> int:
    return path.stat().st_ino if path.exists() else 0


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


# In the pool's workers: two of them, for the collective in flight.
TOLD_IN = 27
STOPPED_AT = 33
POOLED = (*STORY, "checkpoint.every=10")


@pytest.fixture(scope="module")
def whole(workers: Pool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Undisturbed."""
    return pooled(workers, 2, *POOLED, runs=tmp_path_factory.mktemp("whole") / "runs")


@pytest.fixture(scope="module")
def stopped(workers: Pool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Stopped at step 33, with the checkpoints of 33 and 30."""
    runs = tmp_path_factory.mktemp("stopped") / "runs"
    run = pooled(workers, 2, *POOLED, runs=runs, setup=stopped_after, setup_arguments=(STOPPED_AT,))
    assert run.status == PREEMPTED
    assert saved_steps(run.folder) == [30, STOPPED_AT]
    return run


def again(workers: Pool, stopped: Run, tmp_path: Path, *kinds: str, rank: int = 0) -> Run:
    """The same command on a copy whose newest checkpoints are damaged."""
    shutil.copytree(stopped.runs, tmp_path / "runs")
    folder = folder_of(*POOLED, "launch.workers=2", runs=tmp_path / "runs")
    for step, kind in zip((STOPPED_AT, 30), kinds, strict=False):
        damage(folder / "checkpoints" / f"step_{step}", kind, part(rank))
    return pooled(workers, 2, *POOLED, runs=tmp_path / "runs")


def test_without_damage(workers: Pool, stopped: Run, whole: Run, tmp_path: Path) -> None:
    run = again(workers, stopped, tmp_path)
    assert resumed_at(run.out) == [STOPPED_AT] and "damaged" not in run.out
    assert_same_run(run.folder, whole.folder)


@pytest.mark.parametrize("rank", grid([0, 1], (1).__eq__))
@pytest.mark.parametrize("kind", grid(DAMAGES, ("flipped", "truncated").__contains__))
def test_a_damaged_checkpoint(
    workers: Pool, stopped: Run, whole: Run, tmp_path: Path, kind: str, rank: int
) -> None:
    run = again(workers, stopped, tmp_path, kind, rank=rank)
    lines = [line for line in run.out.splitlines() if "damaged" in line]
    assert len(lines) == 1 and f"step_{STOPPED_AT} is damaged" in lines[0]
    assert resumed_at(run.out) == [30]
    assert_same_run(run.folder, whole.folder)


def test_no_good_checkpoint(workers: Pool, stopped: Run, tmp_path: Path) -> None:
    """The run does not begin again by itself: somebody may still save what is there."""
    spoil = [partial(damage, kind="truncated"), partial(damage, kind="flipped")]
    _, err = refused_again(workers, stopped, tmp_path, spoil)
    assert re.search(
        "/checkpoints holds no checkpoint that can be used .step_30 is damaged .*checksum", err
    )
    assert "train afresh with resume=never" in err


@contextmanager
def unreadable(error: Exception, rank: int) -> Iterator[None]:
    """Setup: the files of a worker's checkpoints cannot be read."""

    def read(path: Path) -> str:
        raise error

    with patch.object(checkpoint, "_sha256", read) if dist.get_rank() == rank else nullcontext():
        yield


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (OSError(5, "Input/output error"), "Input/output error"),
        (MemoryError(), "MemoryError"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_cannot_be_read_is_not_damaged(
    workers: Pool, stopped: Run, tmp_path: Path, error: Exception, why: str, rank: int
) -> None:
    """Another user's files, a server that does not answer, too little memory."""
    out, err = refused_again(workers, stopped, tmp_path, (), unreadable, (error, rank))
    assert "damaged" not in out
    assert f"/step_{STOPPED_AT}/{part(rank)} cannot be read on worker {rank} ({why}); " in err


def test_a_checkpoint_that_one_worker_does_not_see(
    workers: Pool, stopped: Run, tmp_path: Path
) -> None:
    """Its machine has not mounted the folder of all runs."""
    _, err = refused_again(workers, stopped, tmp_path, (), blind, (1,))
    assert (
        f"/step_{STOPPED_AT}/unmounted cannot be read on worker 1 (No such file or directory); "
        in err
    )


@contextmanager
def blind(rank: int) -> Iterator[None]:
    """Setup: a worker looks for checkpoints in a folder that is not there."""
    path = Checkpoints._path
    blind = patch.object(Checkpoints, "_path", lambda own, step: path(own, step) / "unmounted")
    with blind if dist.get_rank() == rank else nullcontext():
        yield


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl"])
def test_what_else_cannot_be_read(stopped: Run, tmp_path: Path, name: str) -> None:
    shutil.copytree(stopped.runs, tmp_path / "runs")
    folder = folder_of(*POOLED, "launch.workers=2", runs=tmp_path / "runs")
    (folder / name).rename(folder / "elsewhere")
    (folder / name).symlink_to(name)
    before = contents(folder)
    run = cli(*POOLED, "launch.workers=2", runs=tmp_path / "runs")
    assert run.status == REFUSED and contents(folder) == before
    (line,) = run.err.splitlines()
    assert f"/{name} cannot be read (Too many levels of symbolic links); it is kept" in line


def refused_again(
    workers: Pool,
    stopped: Run,
    tmp_path: Path,
    spoil: Sequence[Callable[[Path], None]],
    setup: Callable[..., contextlib.AbstractContextManager[None]] = nullcontext,
    arguments: tuple[Any, ...] = (),
) -> tuple[str, str]:
    """The same command on a copy whose newest checkpoints are spoiled: it is refused in one line,
    and nothing is lost. Returns what is printed."""
    shutil.copytree(stopped.runs, tmp_path / "runs", symlinks=True)
    folder = folder_of(*POOLED, "launch.workers=2", runs=tmp_path / "runs")
    for step, act in zip((STOPPED_AT, 30), spoil, strict=False):
        act(folder / "checkpoints" / f"step_{step}")
    before = contents(folder)
    setting = {"setup": setup, "setup_arguments": arguments}
    run = pooled(workers, 2, *POOLED, runs=tmp_path / "runs", **setting)
    assert run.status == REFUSED and contents(folder) == before
    line, *others = run.err.splitlines()
    assert others in ([], [line]), "each worker tells it here"
    return run.out, line


def test_torn_metrics(workers: Pool, stopped: Run, whole: Run, tmp_path: Path) -> None:
    """A machine that dies may leave half a line, and lines of steps that were not saved."""
    shutil.copytree(stopped.runs, tmp_path / "runs")
    path = folder_of(*POOLED, "launch.workers=2", runs=tmp_path / "runs") / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"kind": "train", "step": 34, "loss": 1.0}\n{"kind": "train", "st')
    run = pooled(workers, 2, *POOLED, runs=tmp_path / "runs")
    assert_same_run(run.folder, whole.folder)


NO_LINES = f"the steps 1 to {STOPPED_AT} are missing"
LOST = {
    "deleted": (Path.unlink, NO_LINES),
    "emptied": (lambda path: path.write_text(""), NO_LINES),
    "garbage": (lambda path: path.write_bytes(bytes(range(128, 255)) * 9), NO_LINES),
    "a line": (lambda path: altered(path, 7, b"[7]\n"), "1 of its lines cannot be read"),
    "its end": (lambda path: cut(path, 30), "the steps 31 to 33 are missing"),
}


def altered(path: Path, line: int, content: bytes) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:line], content, *lines[line + 1 :]]))


def cut(path: Path, last: int) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["step"] <= last))


@pytest.mark.parametrize("how", LOST)
def test_lost_metrics_are_told(workers: Pool, stopped: Run, tmp_path: Path, how: str) -> None:
    """The run goes on, but not as if nothing had been there."""
    shutil.copytree(stopped.runs, tmp_path / "runs")
    path = folder_of(*POOLED, "launch.workers=2", runs=tmp_path / "runs") / "metrics.jsonl"
    lose, says = LOST[how]
    lose(path)
    run = pooled(workers, 2, *POOLED, runs=tmp_path / "runs")
    (line,) = [line for line in run.out.splitlines() if "metrics.jsonl" in line]
    assert says in line and run.status == 0
    assert [line["step"] for line in metrics(run.folder, "train")][-27:] == list(range(34, 61))


@pytest.mark.parametrize("name", ["config.yaml", "manifest.json"])
@pytest.mark.parametrize("how", ["missing", "- {torn", '{"data": {}, "resumed": 5}'])
def test_what_a_run_was_is_needed(stopped: Run, tmp_path: Path, name: str, how: str) -> None:
    """Without its configuration another one would go on with its checkpoints."""
    shutil.copytree(stopped.runs, tmp_path / "runs")
    path = folder_of(*POOLED, "launch.workers=2", runs=tmp_path / "runs") / name
    path.unlink()
    if how != "missing":
        path.write_text(how if name == "manifest.json" else how[:7])
        how = "damaged"
    with pytest.raises(ConfigError, match=rf"/{name} is {how}; train afresh with resume=never"):
        train.APP.prepare_data(configured(*POOLED, "launch.workers=2", runs=tmp_path / "runs"))
    fresh = (*POOLED, "launch.workers=2", "resume=never")
    train.APP.prepare_data(configured(*fresh, runs=tmp_path / "runs"))


def test_the_first_manifest_stays(workers: Pool, stopped: Run, tmp_path: Path) -> None:
    """It is of the start; a later one adds what was another then, and only that."""
    run = again(workers, stopped, tmp_path)
    first, kept = (
        json.loads((folder / "manifest.json").read_text())
        for folder in (stopped.folder, run.folder)
    )
    assert kept == first
    now = {**first, "command": "train.py again", "world_size": 3, "data": {"sha256": "other"}}
    once = of_all_starts(first, now)
    change = {"command": "train.py again", "world_size": 3}
    assert once == {**first, "resumed": [change]}
    assert of_all_starts(once, now) == once
    back = {"command": first["command"], "world_size": 2}
    assert of_all_starts(once, first) == {**first, "resumed": [change, back]}


CONSTANT = ("optim.schedule=constant", "optim.warmup_steps=4", "optim.min_lr_ratio=0.0")
LONGER = (*CONSTANT, "log.every=1", "train.eval_every=8", "tag=longer")


@pytest.mark.parametrize("choice", ["method=co2 co2.tau=3", "method=allreduce optim.name=adamw"])
def test_a_finished_run_goes_on_with_more_steps(workers: Pool, tmp_path: Path, choice: str) -> None:
    """8 steps and then 8 more are 16 at once, bit for bit: also a collective that was under way as
    the run ended, the momentum, and the order of the data."""
    arguments = (*LONGER, *choice.split())
    first = pooled(workers, 2, *arguments, "train.steps=8", runs=tmp_path / "parts")
    assert json.loads((first.folder / "summary.json").read_text())["steps"] == 8
    run = pooled(workers, 2, *arguments, "train.steps=16", runs=tmp_path / "parts")
    assert resumed_at(run.out) == [8]
    whole = pooled(workers, 2, *arguments, "train.steps=16", runs=tmp_path / "whole")
    assert_same_run(run.folder, whole.folder)
    shorter = (*arguments, "train.steps=8", "launch.workers=2")
    with pytest.raises(ConfigError, match=r"train.steps=8: .* holds a run with train.steps=16; "):
        configured(*shorter, runs=tmp_path / "parts")


def test_a_run_that_got_more_steps_has_not_finished(workers: Pool, tmp_path: Path) -> None:
    """Also where it is stopped before the new end: nothing takes the old figures for its own."""
    runs, arguments = tmp_path / "runs", (*LONGER, "method=co2", "co2.tau=2")
    pooled(workers, 2, *arguments, "train.steps=4", runs=runs)
    more = (*arguments, "train.steps=40")
    config = configured(*more, "launch.workers=2", runs=runs)
    assert read_summary(config) is None
    with pytest.raises(ConfigError, match=r"train.steps=40: .* holds a run with train.steps=4; "):
        check_folder(config, 2, as_it_is=True)
    stop = {"setup": stopped_after, "setup_arguments": (10,)}
    run = pooled(workers, 2, *more, runs=runs, **stop)
    assert run.status == PREEMPTED and not (run.folder / "summary.json").exists()
    ended = pooled(workers, 2, *more, runs=runs)
    assert ended.status == 0 and read_summary(config) is not None


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("optim.schedule=cosine",), "only optim.schedule=constant goes on with more"),
        (("optim.warmup_steps=5",), "only optim.schedule=constant goes on with more"),
        (("checkpoint.every=0",), "the last was not saved"),
    ],
)
def test_no_more_steps(workers: Pool, tmp_path: Path, words: tuple[str, ...], reason: str) -> None:
    """Where the rate depends on their number, and where the last step was not saved."""
    arguments = (*LONGER, *words)
    pooled(workers, 1, *arguments, "train.steps=4", runs=tmp_path)
    longer = (*arguments, "train.steps=8", "launch.workers=1")
    with pytest.raises(ConfigError, match=rf"^train.steps=8: .* train.steps=4, .*{reason}.*tag="):
        configured(*longer, runs=tmp_path)


def full_for_worker_1(
    way: str, failing: tuple[int, ...]
) -> contextlib.AbstractContextManager[None]:
    """Setup: what worker 1 saves at these steps does not fit on its disk."""

    def when(path: Path) -> bool:
        return dist.get_rank() == 1 and int(path.parts[-3].removeprefix(".step_")) in failing

    return full_disk(way, when)


@pytest.mark.parametrize("way", ["stub", "real"])
def test_a_full_disk(workers: Pool, whole: Run, tmp_path: Path, way: str) -> None:
    run = pooled(
        workers,
        2,
        *POOLED,
        runs=tmp_path / "runs",
        setup=full_for_worker_1,
        setup_arguments=(way, (30, 40, 50, 60)),
    )
    assert run.status == 0
    lines = [line for line in run.out.splitlines() if "could not be saved" in line]
    assert len(lines) == 4
    assert lines[0].startswith("step 30 ") and "worker 1" in lines[0]
    assert re.search(FULL, lines[0])
    assert saved_steps(run.folder) == [10, 20]
    assert not list((run.folder / "checkpoints").glob(".*"))
    assert_same_run(run.folder, whole.folder)


@contextmanager
def full_disk_and_told_to_stop(step: int) -> Iterator[None]:
    with full_for_worker_1("stub", tuple(range(step, 61))), stopped_after(STOPPED_AT):
        yield


def test_stopped_on_a_full_disk(workers: Pool, whole: Run, tmp_path: Path) -> None:
    """Nothing was saved, so the status must not say so; the older checkpoint carries on."""
    run = pooled(
        workers,
        2,
        *POOLED,
        runs=tmp_path / "runs",
        setup=full_disk_and_told_to_stop,
        setup_arguments=(TOLD_IN,),
    )
    assert run.status not in (0, PREEMPTED)
    assert "stopped and saved" not in run.out
    assert saved_steps(run.folder) == [10, 20]
    run = pooled(workers, 2, *POOLED, runs=tmp_path / "runs")
    assert resumed_at(run.out) == [20]
    assert_same_run(run.folder, whole.folder)


@pytest.mark.parametrize("every", ["log.every=7", "checkpoint.every=7", "checkpoint.keep=1"])
def test_what_may_change_between_segments(
    workers: Pool, stopped: Run, whole: Run, tmp_path: Path, every: str
) -> None:
    shutil.copytree(stopped.runs, tmp_path / "runs")
    run = pooled(workers, 2, *POOLED, every, runs=tmp_path / "runs")
    assert resumed_at(run.out) == [STOPPED_AT]
    assert_same_weights(run.folder, whole.folder)
    assert [line["step"] for line in metrics(run.folder, "eval")] == [10, 20, 30, 40, 50, 60]


CHOICES = [(f"method={method}", *overrides(method)) for method in METHODS]
ELEMENTWISE = ("co2.gap_penalty=gap_aware_elementwise", "co2.clip=0.1")
CHOICES += [("method=co2", "co2.tau=3", *own) for own in (ELEMENTWISE, ("co2.shard=true",))]
CHOICES += [("method=co2_keep", "co2_keep.tau=3", "co2_keep.average_moments=true")]
LATE_MOMENTUM = ("mt_dao.first_moment_every=6", "mt_dao.late_momentum=true")
CHOICES += [("method=mt_dao", "mt_dao.tau=3", *LATE_MOMENTUM)]
QUANTIZED = ("streaming_diloco.delay=2", "streaming_diloco.exchange=int4")
CHOICES += [("method=streaming_diloco", "streaming_diloco.tau=3", *QUANTIZED)]


@pytest.mark.parametrize(
    "choice", grid(CHOICES, lambda choice: ELEMENTWISE[0] in choice, one=True), ids=" ".join
)
def test_every_method_goes_on_exactly(
    workers: Pool, tmp_path: Path, choice: tuple[str, ...]
) -> None:
    """AdamW, accumulation and an evaluation are among what a checkpoint must carry over. What is in
    flight differs between the steps of a round: CO2 is stopped at each of them, the others at one
    in turn, since tests/methods/test_contract.py stops all of them everywhere."""
    arguments = (
        "optim.name=adamw",
        "optim.lr=0.01",
        *choice,  # which may name another optimizer
        "train.steps=24",
        "train.accumulate=2",
        "train.eval_every=5",
        "log.every=1",
        "checkpoint.every=0",
    )
    undisturbed = pooled(workers, 2, *arguments, runs=tmp_path / "whole")
    steps = (13, 14, 15) if choice[0] == "method=co2" else (13 + CHOICES.index(choice) % 3,)
    for stop in steps:
        runs = tmp_path / str(stop)
        told = {"setup": stopped_after, "setup_arguments": (stop,)}
        run = pooled(workers, 2, *arguments, runs=runs, **told)
        assert run.status == PREEMPTED
        run = pooled(workers, 2, *arguments, runs=runs)
        assert run.status == 0 and resumed_at(run.out) == [stop]
        assert_same_run(run.folder, undisturbed.folder)


def test_a_moving_average_goes_on_exactly(workers: Pool, tmp_path: Path) -> None:
    arguments = ("method=co2", "co2.tau=3", "train.steps=24", "train.eval_every=5", "log.every=1")
    arguments += ("checkpoint.every=0", "train.ema_decay=0.9")
    undisturbed = pooled(workers, 2, *arguments, runs=tmp_path / "whole")
    runs = tmp_path / "stopped"
    stopping = {"setup": stopped_after, "setup_arguments": (14,)}
    assert pooled(workers, 2, *arguments, runs=runs, **stopping).status == PREEMPTED
    run = pooled(workers, 2, *arguments, runs=runs)
    assert run.status == 0 and len(resumed_at(run.out)) == 1
    assert_same_run(run.folder, undisturbed.folder)
    saved, whole = (torch.load(one.folder / "model_ema.pt") for one in (run, undisturbed))
    assert all(torch.equal(weight, whole[name]) for name, weight in saved.items())
    last = torch.load(run.folder / "model.pt")
    assert not all(torch.equal(weight, last[name]) for name, weight in saved.items())
    final = json.loads((run.folder / "summary.json").read_text())["final"]
    assert final["ema_loss"] != final["loss"]
    # The export of either has its weights.
    for words, expected in (([], last), (["--ema"], saved)):
        made = tmp_path / f"made{len(words)}"
        assert train.APP.main(["export", str(run.folder), str(made), *words]) == 0
        there = load_file(made / "model.safetensors")
        assert there.keys() == expected.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in there.items())


@contextmanager
def noisy(path: str, stopped_at: int) -> Iterator[None]:
    """Setup: losses draw from every global generator, as dropout and augmentation may; all
    stop after a step; each worker appends its draws to a file."""
    original = Toy.loss

    def loss(task: Toy, *arguments: Any) -> Tensor:
        drawn = [random.gauss(0, 1), float(np.random.randn()), torch.randn(()).item()]
        with Path(f"{path}.{dist.get_rank()}").open("a") as file:
            file.write(json.dumps(drawn) + "\n")
        return original(task, *arguments) * (1 + 0.1 * sum(drawn))

    with patch.object(Toy, "loss", loss), stopped_after(stopped_at):
        yield


def test_random_draws_go_on(workers: Pool, tmp_path: Path) -> None:
    drawn = {}
    for name, stopped_at in (("whole", 99), ("parts", 13)):
        arguments = (
            "train.steps=20",
            "co2.tau=3",
            "log.every=1",
            "checkpoint.every=0",
        )
        setup = {"setup": noisy, "setup_arguments": (str(tmp_path / name), stopped_at)}
        runs = tmp_path / f"{name}-runs"
        if name == "parts":
            assert pooled(workers, 2, *arguments, runs=runs, **setup).status == PREEMPTED
            setup["setup_arguments"] = (str(tmp_path / name), 99)
        assert pooled(workers, 2, *arguments, runs=runs, **setup).status == 0
        drawn[name] = [(tmp_path / f"{name}.{rank}").read_text() for rank in (0, 1)]
    assert drawn["whole"] == drawn["parts"]
    first, second = (set(text.splitlines()) for text in drawn["whole"])
    assert len(first) == len(second) == 20 and not first & second, "replicas draw differently"
    one, other = (
        folder_of(*arguments, "launch.workers=2", runs=tmp_path / f"{name}-runs") for name in drawn
    )
    assert_same_run(one, other)


DIVERGE = ("optim.lr=1e30", "optim.schedule=constant", "optim.warmup_steps=0")


def assert_line(err: str, step: int | None, replica: int, last: str) -> None:
    """One line names step, worker and the last good checkpoint."""
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    match = re.match(r"error: the loss is (nan|inf|-inf) at step (\d+) on worker (\d+); ", lines[0])
    assert match, lines[0]
    assert step is None or int(match.group(2)) == step
    assert int(match.group(3)) == replica
    assert f"last good checkpoint: {last}" in lines[0]
    assert "optim.lr" in lines[0]


def test_a_loss_that_is_not_finite(workers: Pool, tmp_path: Path) -> None:
    run = pooled(workers, 1, *DIVERGE, "checkpoint.every=0", runs=tmp_path / "runs")
    assert run.status == DIVERGED == 65
    assert_line(run.err, None, 0, "none")
    assert not (run.folder / "summary.json").exists()


def test_a_loss_that_is_not_finite_after_a_checkpoint(workers: Pool, tmp_path: Path) -> None:
    run = pooled(workers, 1, *DIVERGE, "checkpoint.every=1", runs=tmp_path / "runs")
    assert run.status == DIVERGED
    newest = saved_steps(run.folder)[-1]
    assert_line(run.err, newest + 1, 0, os.path.relpath(run.folder / f"checkpoints/step_{newest}"))
    assert all(line["loss"] is not None for line in story(run.folder)), "logged as a good one"


def test_a_loss_that_is_not_finite_on_another_replica(tmp_path: Path) -> None:
    """Whoever of the workers ends first: the status is that of the one with the reason."""
    script = Path(__file__).with_name("poisoned.py")
    arguments = (*STORY, "checkpoint.every=3")
    runs = tmp_path / "runs"
    ended = cli(*arguments, runs=runs, script=script)
    assert_line(ended.err, 7, 1, "runs/toy/co2/")
    assert "checkpoints/step_6;" in ended.err
    assert len(ended.err.splitlines()) == 1, "the other workers end in silence"
    assert ended.status == DIVERGED


@contextmanager
def bad_gradient(step: int) -> Iterator[None]:
    """Setup: the gradient of a step is not a number on worker 0, though its loss is finite."""
    original, calls = Toy.loss, itertools.count(1)

    def loss(task: Toy, *arguments: Any) -> Tensor:
        value = original(task, *arguments)
        if next(calls) == step and dist.get_rank() == 0:
            value.register_hook(lambda gradient: gradient * math.nan)
        return value

    with patch.object(Toy, "loss", loss):
        yield


BAD = 20
NOT_FINITE = ("train.steps=40", "train.eval_every=100", "checkpoint.every=5", "tag=bad")


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (2, ("method=allreduce",)),
        (2, ("method=local_sgd", "local_sgd.tau=4")),
        (1, ("method=co2", "co2.tau=10")),  # its weights are finite: the mean is under way
    ],
    ids=str,
)
def test_what_is_not_finite_is_no_checkpoint(
    workers: Pool, tmp_path: Path, world: int, words: tuple[str, ...]
) -> None:
    """Else every restart would go on from it, and end again."""
    words, setting = (*NOT_FINITE, *words), {"setup": bad_gradient, "setup_arguments": (BAD,)}
    run = pooled(workers, world, *words, runs=tmp_path / "runs", **setting)
    assert run.status == DIVERGED and "/checkpoints/step_15; try a lower optim.lr" in run.err
    assert saved_steps(run.folder) == [10, 15]
    healthy = pooled(workers, world, *words, runs=tmp_path / "runs")
    assert healthy.status == 0 and resumed_at(healthy.out) == [15]


@pytest.mark.parametrize("world", [1, 2])
def test_a_bad_last_step(workers: Pool, tmp_path: Path, world: int) -> None:
    """No forward pass follows, but an evaluation."""
    words, setting = (*NOT_FINITE, "train.steps=20"), {"setup_arguments": (BAD,)}
    run = pooled(workers, world, *words, runs=tmp_path / "runs", setup=bad_gradient, **setting)
    assert run.status == DIVERGED and not (run.folder / "summary.json").exists()
    assert "error: the validation loss is nan at step 20; last good checkpoint: " in run.err
    assert "/checkpoints/step_15; " in run.err and not (run.folder / "model.pt").exists()


def test_told_to_stop_where_nothing_is_finite(workers: Pool, tmp_path: Path) -> None:
    words, stop = (*NOT_FINITE, "method=allreduce"), bad_gradient_and_told_to_stop
    setting = {"setup": stop, "setup_arguments": (18,)}
    run = pooled(workers, 2, *words, runs=tmp_path / "runs", **setting)
    assert run.status == DIVERGED and saved_steps(run.folder) == [10, 15]
    assert re.search(r"error: worker \d: .* is not finite at step 18; .*/step_15; ", run.err)


@contextmanager
def bad_gradient_and_told_to_stop(step: int) -> Iterator[None]:
    with bad_gradient(step), stopped_after(step):
        yield


@pytest.mark.parametrize("elastic", ["false", "true"])
def test_a_loss_that_is_not_finite_on_all_replicas(tmp_path: Path, elastic: str) -> None:
    """It is told by one of them."""
    words = (*DIVERGE, "method=local_sgd", f"launch.elastic={elastic}")
    ended = cli(*words, runs=tmp_path / "runs")
    assert ended.status == DIVERGED
    assert len(re.findall("the loss is", ended.err)) == 1, ended.err
