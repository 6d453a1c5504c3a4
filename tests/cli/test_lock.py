"""One run at a time trains in a folder, and no worker outlives what started it."""

import errno
import fcntl
import json
import os
import signal
import socket
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

import train
from co2.errors import PREEMPTED, REFUSED, ConfigError
from co2.record import lock
from co2.record.lock import NAME, FolderLock
from tests.cli.harness import (
    LIMIT_S,
    LINGER_S,
    STORY,
    alive,
    cli,
    command,
    configured,
    folder_of,
    folders,
    held_port,
    metrics,
    started,
    until,
)
from tests.server import environment, fork_program
from tests.workers import Pool

HOST = socket.gethostname()
RUN = (*STORY, "tag=one", "toy.delay_s=0.1")


def named(folder: Path, process: int = 4711, host: str = "node3") -> Path:
    """The lock that a process has left."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAME).write_text(json.dumps({"process": process, "host": host}))
    return folder


def holder(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / NAME).read_text())
    return found


def test_the_second_of_two_is_refused(tmp_path: Path) -> None:
    """In one line that names the first, which goes on; also as tasks of srun, and with
    resume=never, which would move the folder aside under it."""
    runs, log = tmp_path / "runs", tmp_path / "log"
    folder = folder_of(*RUN, runs=runs)
    with started(*RUN, runs=runs, log=log) as first:
        until(lambda: len(metrics(folder)) > 0, first)
        os.killpg(first.pid, signal.SIGSTOP)  # so that it does not end meanwhile
        for more in ((), ("resume=never",)):
            second = cli(*RUN, *more, runs=runs)
            assert second.status == REFUSED and second.out == ""
            (line,) = second.err.splitlines()
            assert line.startswith("error: tag=one: runs/toy/co2/one/seed0 is held by ")
            assert f"held by {first.pid} on {HOST}; " in line and "tag=NAME" in line
        statuses, text = as_tasks(tmp_path, runs)
        assert statuses == [REFUSED, REFUSED] and text.count("\n") == 1, text
        assert f"held by {first.pid} on {HOST}; " in text
        os.kill(first.pid, signal.SIGTERM)
        os.killpg(first.pid, signal.SIGCONT)
        assert first.wait(LIMIT_S) == PREEMPTED, log.read_text()
    assert folders(runs) == [folder] and not (folder / NAME).exists()
    FolderLock.take(folder).release()


def as_tasks(tmp_path: Path, runs: Path) -> tuple[list[int], str]:
    """The same run with two tasks of srun: their statuses, and what both print."""
    log, tasks = tmp_path / "tasks", []
    place = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    place["MASTER_ADDR"] = "127.0.0.1"
    with held_port() as port:
        with log.open("a") as file:
            for rank in ("0", "1"):
                env = environment(**place, SLURM_PROCID=rank, SLURM_LOCALID=rank, MASTER_PORT=port)
                _, *words = command(*RUN, runs=runs)
                tasks.append(fork_program(words, tmp_path, env, file.fileno(), file.fileno()))
        try:
            return [task.wait(LIMIT_S) for task in tasks], log.read_text()
        finally:
            for task in tasks:
                task.kill()


def test_afresh_moves_only_runs_aside(tmp_path: Path) -> None:
    """Not the folder that was made to be held."""
    words = ("train.steps=1", "launch.workers=1", "resume=never")
    config = configured(*words, runs=tmp_path)
    for names in (["seed0"], ["seed0", "seed0.1"]):
        assert train.APP.run(config) == 0
        assert [folder.name for folder in folders(tmp_path)] == names
        assert all((folder / "summary.json").exists() for folder in folders(tmp_path))


def test_workers_end_with_what_started_them(tmp_path: Path) -> None:
    """SIGKILL to train.py alone: its workers trained on beside those of the same command."""
    arguments, runs, log = (*STORY, "toy.delay_s=2"), tmp_path / "runs", tmp_path / "log"
    folder = folder_of(*arguments, runs=runs)
    with started(*arguments, runs=runs, log=log) as process:
        until(lambda: len(metrics(folder)) > 0, process)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(LIMIT_S) == -signal.SIGKILL
        deadline = time.monotonic() + LINGER_S
        while alive(process.pid):
            assert time.monotonic() < deadline, "a worker outlives what started it"
            time.sleep(0.02)
    assert not (folder / "summary.json").exists() and "Traceback" not in log.read_text()
    assert (folder / NAME).exists()
    FolderLock.take(folder).release()


def test_what_a_process_has_left_is_taken_over(tmp_path: Path) -> None:
    """On the same host at once, whoever has its number now."""
    for content in (
        json.dumps({"process": os.getppid(), "host": HOST}),
        "",
        "torn{",
        "[1]",
        '{"process": Infinity, "host": 3}',
    ):
        folder = named(tmp_path)
        (folder / NAME).write_text(content)
        held = FolderLock.take(folder)
        assert holder(folder) == {"process": os.getpid(), "host": HOST}
        held.release()
        assert not (folder / NAME).exists()


@pytest.mark.parametrize("locks", [True, False])
def test_a_run_on_another_host_that_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    """It touches its file, also where the file system has no locks, or none for other hosts."""
    if not locks:
        without_locks(monkeypatch)
    monkeypatch.setattr(lock, "_BEAT_S", 0.01)
    folder = named(tmp_path / "mine")
    file = os.open(folder / NAME, os.O_RDWR)
    first = FolderLock(folder, file)  # does not hold what only its host's kernel would know
    with pytest.raises(ConfigError, match="held by 4711 on node3; let that run end"):
        FolderLock.take(folder)
    first.release()
    FolderLock.take(folder).release()


@pytest.mark.parametrize("locks", [True, False])
def test_a_run_on_another_host_that_was_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    locks: bool,
) -> None:
    if not locks:
        without_locks(monkeypatch)
    monkeypatch.setattr(lock, "_SILENT_S", 0.2)
    held = FolderLock.take(named(tmp_path / "lost"))
    assert "lost was held by 4711 on node3: looking if it still is" in capsys.readouterr().out
    assert holder(held.folder)["host"] == HOST
    held.release()


def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, what: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", refuse)


def take_in_turn(rank: int, world: int, place: str) -> list[str]:
    """Worker 0 takes the folder, and what worker 1 meets."""
    folder, met = Path(place), []
    first = FolderLock.take(folder) if rank == 0 else None
    dist.barrier()
    if rank == 1:
        met.append(refusal(folder))
        second = FolderLock.take_over(folder)
    dist.barrier()
    if first is not None:
        first.release()
        met.append(refusal(folder))
    dist.barrier()
    if rank == 1:
        second.release()
        met.append(str((folder / NAME).exists()))
    return met


def refusal(folder: Path) -> str:
    try:
        FolderLock.take(folder).release()
    except ConfigError as error:
        return str(error)
    return ""


def test_who_was_given_up_does_not_free_the_folder(workers: Pool, tmp_path: Path) -> None:
    """An elastic run's first worker may be silent, and come back after another is the first."""
    (after,), (before, left) = workers.run(take_in_turn, 2, str(tmp_path))
    assert "is held by " in before and "is held by " in after
    assert before != after and left == "False"


def locked_elsewhere(rank: int, world: int, place: str) -> bool:
    """Worker 1 is a host that was lost, whose lock a file server keeps."""
    folder = Path(place)
    if rank == 1:
        file = os.open(named(folder) / NAME, os.O_RDWR)
        fcntl.lockf(file, fcntl.LOCK_EX)
    dist.barrier()
    if rank == 0:
        with patch.object(lock, "_SILENT_S", 0.2):
            held = FolderLock.take(folder)
        held.release()
    dist.barrier()
    return (folder / NAME).exists()


def test_a_lock_that_a_lost_host_has_left(workers: Pool, tmp_path: Path) -> None:
    assert workers.run(locked_elsewhere, 2, str(tmp_path / "run")) == [False, False]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """What it leads to would be written over."""
    (tmp_path / "mine").write_text("precious")
    (tmp_path / NAME).symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"cannot be written"):
        FolderLock.take(tmp_path)
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_place_without_room_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"tag=file: .* cannot be written \(.*\); make room"):
        FolderLock.take(tmp_path / "file" / "seed0")
