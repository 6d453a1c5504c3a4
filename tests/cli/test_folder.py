"""A run's folder: its name, who holds it, and what it says that was trained."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import train
from co2.app.compose import preflight
from co2.errors import PREEMPTED, REFUSED, ConfigError
from co2.methods.co2 import CO2
from co2.record import files, fingerprint, folder, lock
from co2.record.fingerprint import digest
from co2.record.folder import run_folder, tag_from
from co2.record.lock import NAME, FolderLock
from co2.record.provenance import of_run
from tasks.shared import sampling
from tasks.toy import Toy
from tests.cli.harness import (
    LIMIT_S,
    STORY,
    TOY,
    Process,
    as_tasks,
    assert_same_run,
    cli,
    command,
    folder_of,
    folders,
    interrupted,
    manifest,
    metrics,
    pooled,
    started,
    trained,
    until,
    until_all_have_ended,
)
from tests.workers import Pool, everybody, replicas


def tag(*overrides: str, world: int = 2, method: str = "co2") -> str:
    return tag_from(overrides, world, 2, method)


FREE = ("task=toy", "method=co2", "train.seed=3", "log.every=1", "checkpoint.keep=9", "runs=/x")
FREE += ("resume=never", "data.root=/x", "launch.backend=gloo", "launch.gpu=h100", "tag=x")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((*FREE, "hydra.verbose=true"), "default"),
        (("co2.tau=3",), "tau3"),
        (("++co2.tau=3",), "tau3"),
        (("optim.lr=1e-3",), "lr1e_3"),
        (("scale=paper",), "paper"),
        (("co2.tau=3", "optim.lr=0.1"), "lr0.1-tau3"),
        (("optim.lr=0.1", "co2.tau=3"), "lr0.1-tau3"),
        (("co2.tau=3", "co2.tau=4 "), "tau4"),
    ],
)
def test_a_tag(overrides: tuple[str, ...], expected: str) -> None:
    """It names what matters, in any order, and nothing else."""
    assert tag(*overrides) == expected


def test_a_tag_of_another_method_and_of_the_workers_of_torchrun() -> None:
    assert tag("slowmo.tau=3", method="slowmo") == "tau3"
    assert tag("co2.tau=3", world=4) == "tau3-workers4"


@pytest.mark.parametrize("value", ["/home/me/text.txt", "../up", "a b", "x:y", "[1,2]", "ü/é"])
def test_a_tag_is_a_plain_folder_name(value: str) -> None:
    made = tag(f"data.path={value}")
    assert not set(made) & set("/\\ :[],'\"") and made not in ("", ".", "..")


def test_long_tags_are_cut_and_differ() -> None:
    many = [f"co2.key{number}={number}" for number in range(40)]
    one, other = tag(*many, "co2.z=1"), tag(*many, "co2.z=2")
    assert one != other and len(one) <= 120


def test_the_tags_of_a_sweep_never_collide() -> None:
    swept = {"co2.tau": (1, 11, 111), "optim.lr": ("0.1", "0.11", "1e-1")}
    swept |= {"co2.gap_penalty": ("none", "gap_aware", "1.5"), "launch.workers": (1, 2)}
    jobs = list(itertools.product(*([f"{key}={one}" for one in swept[key]] for key in swept)))
    assert len({tag(*job) for job in jobs}) == len(jobs) == 54


@pytest.mark.parametrize(("rank", "times"), [("0", 1), ("1", 0)])
def test_one_worker_lists_the_folder_of_a_new_run(
    tmp_path: Path, variables: Callable, rank: str, times: int
) -> None:
    """Before the workers of torchrun know each other. That of a run that goes on all look at."""
    words = [*TOY, f"runs={tmp_path}", "train.global_batch=32", "train.batch_size=16"]
    variables(RANK=rank, WORLD_SIZE="2")
    with patch.object(folder, "saved_steps", wraps=files.saved_steps) as listed:
        (config,) = preflight(train.APP.conf, words, train.APP.check)
        assert listed.call_count == times
        there = run_folder(config)
        (there / "checkpoints" / "step_4").mkdir(parents=True)
        (there / "config.yaml").touch()
        with pytest.raises(ConfigError, match=r"config\.yaml is damaged"):
            preflight(train.APP.conf, words, train.APP.check)


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
            second = cli(*RUN, *more, runs=runs, status=REFUSED)
            assert second.out == ""
            (line,) = second.err.splitlines()
            assert line.startswith("error: tag=one: runs/toy/co2/one/seed0 is held by ")
            assert f"held by {first.pid} on {HOST}; " in line and "tag=NAME" in line
        (line,) = "".join(as_tasks(command(*RUN, runs=runs)[1:], tmp_path, REFUSED)).splitlines()
        assert f"held by {first.pid} on {HOST}; " in line
        os.kill(first.pid, signal.SIGTERM)
        os.killpg(first.pid, signal.SIGCONT)
        assert first.wait(LIMIT_S) == PREEMPTED, log.read_text()
    assert folders(runs) == [folder] and not (folder / NAME).exists()
    FolderLock.take(folder).release()


def test_workers_end_with_what_started_them(tmp_path: Path) -> None:
    """SIGKILL to train.py alone: its workers trained on beside those of the same command."""

    def kill(process: Process) -> None:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)
        until_all_have_ended(process)

    told = {"when": trained(1), "act": kill, "status": -signal.SIGKILL}
    run = interrupted(*STORY, "toy.delay_s=2", runs=tmp_path / "runs", **told)
    assert not (run.folder / "summary.json").exists() and "Traceback" not in run.out
    assert (run.folder / NAME).exists()
    FolderLock.take(run.folder).release()


def test_what_a_process_has_left_is_taken_over(tmp_path: Path) -> None:
    """On the same host at once, whoever has its number now."""
    mine = json.dumps({"process": os.getppid(), "host": HOST})
    for content in (mine, "", "torn{", "[1]", '{"process": Infinity, "host": 3}'):
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], locks: bool
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


def refusal(folder: Path) -> str:
    try:
        FolderLock.take(folder).release()
    except ConfigError as error:
        return str(error)
    return ""


@replicas(2)
def test_who_was_given_up_does_not_free_the_folder(rank: int, tmp_path: Path) -> None:
    """An elastic run's first worker may be silent, and come back after another is the first."""
    before = after = ""
    first = FolderLock.take(tmp_path) if rank == 0 else None
    dist.barrier()
    if rank == 1:
        before = refusal(tmp_path)
        second = FolderLock.take_over(tmp_path)
    dist.barrier()
    if first is not None:
        first.release()
        after = refusal(tmp_path)
    (after, _), (_, before) = everybody((after, before))
    if rank == 1:
        second.release()
    assert "is held by " in before and "is held by " in after and before != after
    assert rank == 0 or not (tmp_path / NAME).exists()


@replicas(2)
def test_a_lock_that_a_lost_host_has_left(rank: int, tmp_path: Path) -> None:
    """Worker 1 is a host that was lost, whose lock a file server keeps."""
    folder = tmp_path / "run"
    if rank == 1:
        file = os.open(named(folder) / NAME, os.O_RDWR)
        fcntl.lockf(file, fcntl.LOCK_EX)
    dist.barrier()
    if rank == 0:
        with patch.object(lock, "_SILENT_S", 0.2):
            FolderLock.take(folder).release()
    dist.barrier()
    assert not (folder / NAME).exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """What it leads to would be written over."""
    (tmp_path / "mine").write_text("precious")
    (tmp_path / NAME).symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"cannot be written"):
        FolderLock.take(tmp_path)
    assert (tmp_path / "mine").read_text() == "precious"


SHORT = ("train.steps=4", "train.eval_every=4", "checkpoint.every=0")


def told(workers: Pool, runs: Path, *words: str, world: int = 2, **setup: Any) -> dict[str, Any]:
    """The fingerprint of a run."""
    run = pooled(workers, world, *SHORT, *words, runs=runs, fresh=True, **setup)
    known = manifest(run.folder)["fingerprint"]
    return {key: round(value, 5) if key == "loss" else value for key, value in known.items()}


@contextlib.contextmanager
def another_order() -> Iterator[None]:
    """Setup: the samples come in another order from the second batch on."""
    indices = sampling.Sampler.indices

    def other(self: sampling.Sampler, draw: int, worker: int) -> Any:
        own = indices(self, draw, worker)
        return own[::-1].copy() if draw == 1 and worker == 1 else own

    with patch.object(sampling.Sampler, "indices", other):
        yield


@contextlib.contextmanager
def other_weights() -> Iterator[None]:
    model = Toy.model

    def other(self: Toy) -> torch.nn.Module:
        made = model(self)
        torch.nn.init.zeros_(made[3].bias)
        return made

    with patch.object(Toy, "model", other):
        yield


@contextlib.contextmanager
def raised() -> Iterator[None]:
    with patch.object(Toy, "version", 2), patch.object(CO2, "version", 3):
        yield


def test_it_changes_with_what_a_run_trains_on_and_with(workers: Pool, tmp_path: Path) -> None:
    """And with nothing else: method, rate and a micro-batch's place in a step do not count."""
    first = told(workers, tmp_path / "runs", "method=co2")
    assert first.keys() == {"data", "weights", "task", "method", "loss"}
    assert first["task"] == Toy.version and first["method"] == CO2.version
    same = told(workers, tmp_path / "others", "method=allreduce", "optim.lr=0.01")
    assert same == first

    def differ(*words: str, **setup: Any) -> set[str]:
        place = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        now = told(workers, place, "method=co2", *words, **setup)
        return {key for key in first if now[key] != first[key]}

    assert differ("train.seed=1") == {"data", "weights", "loss"}
    assert differ(world=1) == {"data", "loss"}
    assert differ(setup=another_order) == {"data"}
    assert differ(setup=other_weights) == {"weights", "loss"}
    assert differ(setup=raised) == {"task", "method"}


def test_a_resumed_run_keeps_it(workers: Pool, tmp_path: Path) -> None:
    """And to tell it moves no batch and no generator: a run stopped before goes on exactly."""
    words = ("method=co2", "co2.tau=3", "train.steps=8", "log.every=1")
    whole = pooled(workers, 2, *words, runs=tmp_path / "whole")
    for step in (1, 3):
        runs = tmp_path / f"stopped_{step}"
        pooled(workers, 2, *words, runs=runs, stop_at=step)
        again = pooled(workers, 2, *words, runs=runs)
        assert_same_run(again.folder, whole.folder)
        kept, first = of_run(again.folder), of_run(whole.folder)
        assert kept["fingerprint"] == ("" if step == 1 else first["fingerprint"])
        assert fingerprint.parts(first["fingerprint"])["method"] == "1"
        assert kept["torch"] == torch.__version__.partition("+")[0]


@pytest.mark.parametrize("size", [1, 7, 5000])
def test_the_last_bits_of_a_float_do_not_count(size: int) -> None:
    """Processors round them differently; whatever is larger counts, and every bit of integers."""
    floats = torch.randn(size, generator=torch.Generator().manual_seed(size))
    same = floats * (1 + 2e-7 * torch.randn(size))
    assert digest((floats,)) == digest([same]) != digest(-floats)
    assert digest(floats) != digest(floats * 1.02)
    assert size == 1 or digest(floats) != digest(floats.flip(0))
    whole = torch.arange(size)
    assert digest({"a": whole}) != digest({"a": whole + 1})
    assert digest(torch.zeros(0)) == digest(torch.zeros(0))
