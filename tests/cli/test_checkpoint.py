"""What saving, stopping and starting are made of, piece by piece."""

import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from co2.comm.mesh import Mesh
from co2.config import LaunchConfig
from co2.errors import ConfigError, WorkerLost
from co2.randomness import random_states, restore_random_states
from co2.record.folder import tag_from
from co2.start.identity import Identity, first_host, identity, is_first, world_size
from co2.train import checkpoint, state_file
from co2.train import stop as stop_module
from co2.train.checkpoint import MANIFEST, Checkpoints
from co2.train.stop import StopVote
from tests.workers import Pool

FULL = "No space left|File too large"
"""What the system says where there is no room."""
ALONE = Mesh(0, 1, torch.device("cpu"))
DAMAGES = ("truncated", "flipped", "missing", "no manifest", "torn manifest", "only the folder")


def state(step: int) -> dict[str, Any]:
    """A state that tells its step, with the kinds of values that real ones hold."""
    return {
        "weight": torch.full((3, 2), float(step)),
        "half": torch.full((5,), step, dtype=torch.bfloat16),
        "count": torch.tensor(step),
        "nested": {"lr": [0.1 * step, None], "in_flight": True, 0: [step, "text"]},
    }


def assert_state(found: tuple[int, dict[str, Any]] | None, step: int) -> None:
    assert found is not None and found[0] == step
    expected = state(step)
    for name in ("weight", "half", "count"):
        assert found[1][name].dtype == expected[name].dtype
        assert torch.equal(found[1][name], expected[name])
    assert found[1]["nested"] == expected["nested"]


def checkpoints(folder: Path, keep: int = 2, lines: list[str] | None = None) -> Checkpoints:
    return Checkpoints(folder, ALONE, None, keep, (lines if lines is not None else []).append)


def part(replica: int = 0, worker: int = 0) -> str:
    """The file of a worker in a checkpoint."""
    return f"replica_{replica}/worker_{worker}.safetensors"


def damage(folder: Path, kind: str, name: str = part()) -> None:
    """Spoil a checkpoint as a disk or a person may."""
    file, manifest = folder / name, folder / MANIFEST
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif kind == "flipped":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif kind == "missing":
        file.unlink()
    elif kind == "no manifest":
        manifest.unlink()
    elif kind == "torn manifest":
        manifest.write_bytes(manifest.read_bytes()[:-9])
    else:
        shutil.rmtree(folder)
        folder.mkdir()


def put_back(folder: Path, step: int) -> None:
    """A checkpoint that was found damaged and set aside."""
    (folder / f"damaged_step_{step}").rename(folder / f"step_{step}")


class TestCheckpoints:
    def test_nothing_is_there(self, tmp_path: Path) -> None:
        assert checkpoints(tmp_path / "none").load() is None

    def test_what_is_saved_is_loaded(self, tmp_path: Path) -> None:
        assert checkpoints(tmp_path).save(7, state(7))
        assert_state(checkpoints(tmp_path).load(), 7)

    @pytest.mark.parametrize("keep", [1, 2, 3])
    def test_the_newest_are_kept(self, tmp_path: Path, keep: int) -> None:
        saver = checkpoints(tmp_path, keep)
        for step in (8, 9, 10, 11):  # as text, 9 would be newer than 11
            assert saver.save(step, state(step))
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == sorted(f"step_{step}" for step in (11, 10, 9)[:keep])
        assert saver.steps() == [11, 10, 9][:keep]
        assert_state(saver.load(), 11)

    def test_what_is_no_checkpoint_is_left_alone(self, tmp_path: Path) -> None:
        saver = checkpoints(tmp_path, keep=1)
        for name in (".step_9", "step_9.old", "step_x", "notes"):
            (tmp_path / name).mkdir()
        for step in (1, 2):
            assert saver.save(step, state(step))
        assert saver.steps() == [2]
        assert (tmp_path / "step_9.old").exists() and (tmp_path / "notes").exists()
        assert_state(saver.load(), 2)

    @pytest.mark.parametrize("kind", DAMAGES)
    def test_a_damaged_one_is_passed_over(self, tmp_path: Path, kind: str) -> None:
        lines: list[str] = []
        saver = checkpoints(tmp_path, lines=lines)
        for step in (1, 2):
            assert saver.save(step, state(step))
        damage(tmp_path / "step_2", kind)
        assert_state(saver.load(), 1)
        assert len(lines) == 1 and "step_2 is damaged" in lines[0]
        assert "\n" not in lines[0]
        assert saver.save(2, state(2)), "training comes to the same step again"
        assert_state(saver.load(), 2)
        assert len(lines) == 1

    def test_all_are_damaged(self, tmp_path: Path) -> None:
        lines: list[str] = []
        saver = checkpoints(tmp_path, lines=lines)
        for step in (1, 2):
            assert saver.save(step, state(step))
            damage(tmp_path / f"step_{step}", "truncated")
        with pytest.raises(ConfigError, match="holds no checkpoint that can be used"):
            saver.load()
        assert len(lines) == 2 and saver.steps() == [2, 1], "they stay"

    def test_a_damaged_one_is_not_kept_in_place_of_a_good_one(self, tmp_path: Path) -> None:
        saver = checkpoints(tmp_path, keep=2)
        for step in (1, 2):
            assert saver.save(step, state(step))
        damage(tmp_path / "step_2", "truncated")
        assert_state(saver.load(), 1)
        assert saver.save(3, state(3))
        damage(tmp_path / "step_3", "truncated")
        assert_state(saver.load(), 1)

    def test_any_length_of_a_torn_file_is_noticed(self, tmp_path: Path) -> None:
        saver = checkpoints(tmp_path)
        assert saver.save(1, state(1))
        file = tmp_path / "step_1" / part()
        whole = file.read_bytes()
        for length in {0, 1, len(whole) - 1, *range(0, len(whole), 97)}:
            file.write_bytes(whole[:length])
            with pytest.raises(ConfigError, match="holds no checkpoint that can be used"):
                saver.load()

    def test_any_flipped_bit_of_the_manifest_is_survived(self, tmp_path: Path) -> None:
        saver = checkpoints(tmp_path)
        assert saver.save(1, state(1)) and saver.save(2, state(2))
        file = tmp_path / "step_2" / MANIFEST
        whole = file.read_bytes()
        passed_over = 0
        for position in range(len(whole)):
            data = bytearray(whole)
            data[position] ^= 1 << position % 8
            file.write_bytes(data)
            found = saver.load()
            assert found is not None
            assert_state(found, found[0])
            if found[0] == 1:
                passed_over += 1
                put_back(tmp_path, 2)
        assert passed_over > 64, "at least the digits of the checksum count"

    def test_saved_by_another_number_of_workers(self, tmp_path: Path) -> None:
        lines: list[str] = []
        saver = checkpoints(tmp_path, lines=lines)
        assert saver.save(1, state(1))
        saver.world = 2
        assert "1 workers" in saver._read(1)[1]

    def test_killed_at_any_moment(self, tmp_path: Path) -> None:
        """Before each fsync and each rename of saving step 2; 1 or 2 is whole each time."""
        found = []
        for moment in range(1, 99):
            folder = tmp_path / str(moment)
            saver = checkpoints(folder)
            assert saver.save(1, state(1))
            killed = dies_at(moment, lambda saver=saver: saver.save(2, state(2)))
            after = checkpoints(folder).load()
            assert after is not None
            assert_state(after, after[0])
            found.append(after[0])
            saver = checkpoints(folder)
            assert_state(saver.load(), after[0])
            assert saver.save(2, state(2)), "what the dead left behind is no obstacle"
            assert_state(saver.load(), 2)
            assert sorted(path.name for path in folder.iterdir()) == ["step_1", "step_2"]
            if not killed:
                break
        assert len(found) >= 6, "files, manifest, folder: synced and renamed"
        assert found == sorted(found) and set(found) == {1, 2}

    @pytest.mark.parametrize("way", ["stub", "real"])
    @pytest.mark.parametrize("world", [1, 2])
    def test_a_full_disk(self, workers: Pool, tmp_path: Path, way: str, world: int) -> None:
        for saved, steps, lines in workers.run(save_on_a_full_disk, world, str(tmp_path), way):
            assert saved == [True, False, True]
            assert steps == [3, 1]
            assert len(lines) <= 1
            if lines:
                assert "step 2 could not be saved" in lines[0] and "\n" not in lines[0]
                assert f"worker {world - 1}" in lines[0] and re.search(FULL, lines[0])

    @pytest.mark.parametrize("kind", ["truncated", "missing"])
    def test_damage_of_one_worker_counts_for_all(
        self, workers: Pool, tmp_path: Path, kind: str
    ) -> None:
        results = workers.run(load_damaged, 2, str(tmp_path), kind)
        assert [step for step, _ in results] == [1, 1]
        assert [len(lines) for _, lines in results] == [1, 0], "worker 0 speaks"


class Killed(BaseException):
    """What no handler of the program catches."""


def dies_at(moment: int, act: Callable[[], object]) -> bool:
    """Act, and die before the call of fsync or rename with this number; False: it came through."""
    calls = []

    def mortal(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append(original)
            if len(calls) == moment:
                raise Killed
            return original(*arguments)

        return call

    with patch.object(os, "fsync", mortal(os.fsync)), patch.object(Path, "rename", _rename(mortal)):
        try:
            act()
        except Killed:
            return True
    return False


def _rename(mortal: Callable[..., Any]) -> Callable[..., Any]:
    renamed = mortal(Path.rename)
    return lambda path, target: renamed(path, target)


def save_on_a_full_disk(
    rank: int, world: int, folder: str, way: str
) -> tuple[list[bool], list[int], list[str]]:
    """Steps 1, 2, 3; at 2 the last worker's disk is full."""
    mesh, lines = Mesh.world(device="cpu"), []
    saver = Checkpoints(Path(folder), mesh, mesh.new_group_across_replicas("gloo"), 2, lines.append)
    saved = [saver.save(1, state(1))]
    with full_disk(way) if rank == world - 1 else nullcontext():
        saved.append(saver.save(2, state(2)))
    saved.append(saver.save(3, state(3)))
    return saved, saver.steps(), lines


@contextmanager
def full_disk(way: str, when: Callable[[Path], bool] = lambda path: True) -> Iterator[None]:
    """Some states find no room: a limit on files is met, or what a full disk raises is raised."""
    original = state_file.write

    def write(path: Path, *arguments: Any) -> None:
        if not when(path):
            return original(path, *arguments)
        if way == "stub":
            raise OSError(28, "No space left on device")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        try:
            return original(path, *arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with patch.object(state_file, "write", write):
        yield


def load_damaged(rank: int, world: int, folder: str, kind: str) -> tuple[int, list[str]]:
    mesh, lines = Mesh.world(device="cpu"), []
    saver = Checkpoints(Path(folder), mesh, mesh.new_group_across_replicas("gloo"), 2, lines.append)
    for step in (1, 2):
        assert saver.save(step, {**state(step), "rank": rank})
    if rank == 1:
        damage(Path(folder) / "step_2", kind, part(1))
    dist.barrier()
    found = saver.load()
    assert_state(found, 1)
    assert found is not None and found[1]["rank"] == rank
    return found[0], lines


def diverge(rank: int, world: int, folder: str) -> tuple[list[bool], str, int, list[str]]:
    """Worker 1 diverges at step 2, which is saved with and without the check for it."""
    mesh, lines = Mesh.world(device="cpu"), []
    saver = Checkpoints(Path(folder), mesh, mesh.new_group_across_replicas("gloo"), 2, lines.append)
    sound = {**state(1), "model": {"mask": torch.tensor(-math.inf)}, "method": {"anchor": [None]}}
    bad = {**sound, "method": {"anchor": [torch.tensor([0.0, math.nan if rank == 1 else 1.0])]}}
    saved = [saver.save(1, sound), saver.save(2, bad)]
    with patch.object(state_file, "not_finite", lambda _: ""):
        saved.append(saver.save(2, bad))  # as earlier versions did
    found = saver.load()
    assert found is not None
    return saved, saver.diverged, found[0], lines


def test_a_worker_that_diverged_counts_for_all(workers: Pool, tmp_path: Path) -> None:
    fault = "method.anchor.0 is not finite"
    first, other = workers.run(diverge, 2, str(tmp_path))
    for saved, diverged, found, _ in (first, other):
        assert saved == [True, False, True] and found == 1
        assert diverged == f"worker 1: {fault} at step 2"
    assert first[3] == [
        f"step 2 could not be saved (worker 1: {fault}); the one before is kept",
        f"checkpoint step_2 is of a training that diverged ({fault}); trying the one before",
    ]
    assert other[3] == []


def test_random_states_go_on() -> None:
    def draw() -> list[float]:
        own = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
        return [*own, torch.rand(()).item(), torch.randn(()).item()]

    draw()  # an odd number of Gaussians: one is kept for the next call
    states = random_states()
    after = draw()
    assert draw() != after
    restore_random_states(states)
    assert draw() == after


def test_random_states_can_be_saved(tmp_path: Path) -> None:
    saver = checkpoints(tmp_path)
    assert saver.save(1, {"random": random_states()})
    expected = random.random(), np.random.rand(), torch.rand(3)
    found = saver.load()
    assert found is not None
    restore_random_states(found[1]["random"])
    assert (random.random(), np.random.rand()) == expected[:2]
    assert torch.equal(torch.rand(3), expected[2])


def test_write_durably_replaces_whole_files_only(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    checkpoint.write_durably(path, "old")
    for moment in (1, 2):
        assert dies_at(moment, lambda: checkpoint.write_durably(path, "new" * 999))
        assert path.read_text() == "old"
    assert dies_at(3, lambda: checkpoint.write_durably(path, "new")), "its name is synced as well"
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.json"]


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


@pytest.mark.parametrize("told", [{}, {1: 10}], ids=str)
def test_told_too_late_or_never(workers: Pool, told: dict[int, int]) -> None:
    """In the last step: all have ended by themselves."""
    assert workers.run(vote, 2, told, 10) == [(None, True)] * 2


def test_alone_a_stop_is_immediate(workers: Pool) -> None:
    assert workers.run(vote, 1, {0: 4}, 20) == [(4, True)]


def vote_without_thread(rank: int, world: int) -> str:
    store = dist.distributed_c10d._get_default_store().clone()
    with (
        patch.object(StopVote, "_told", side_effect=KeyError("unexpected")),
        StopVote(store, rank, lambda: range(world), [signal.SIGUSR1]) as stop,
    ):
        stop._thread.join()
        try:
            stop(1)
        except KeyError as error:
            return str(error)
    return "it goes on"


def test_a_worker_ends_without_the_thread_that_answers(workers: Pool) -> None:
    """The others would wait for its answer, in an elastic run for ever."""
    assert workers.run(vote_without_thread, 2) == ["'unexpected'"] * 2


def test_what_a_worker_starts_does_not_end_by_signals() -> None:
    """Such as a compiler: a signal to all processes of a run does not disturb the last step."""
    kill = ["sh", "-c", "kill $$; echo it goes on"]
    with StopVote(None, 0, tuple, [signal.SIGTERM]):
        assert subprocess.run(kill, capture_output=True).stdout == b"it goes on\n"


AHEAD = 5


def vote_behind(rank: int, world: int) -> int:
    """Worker 1 is ahead, and waits in its step `AHEAD` for what worker 0 begins in that step.
    Worker 0 is told in its second. Returns the step after which each has stopped."""
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
                return step
    raise AssertionError("it goes on until it stops")


def test_all_stop_after_the_step_of_the_one_that_is_furthest(workers: Pool) -> None:
    """Which waits for the others in the midst of it: nobody is left waiting."""
    assert workers.run(vote_behind, 2) == [AHEAD, AHEAD]


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


TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}


class TestIdentity:
    def test_nobody(self) -> None:
        assert identity({}) is None
        assert identity({"RANK": "0"}) is None
        assert identity({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
        assert identity({"SLURM_PROCID": "0"}) is None

    def test_torchrun(self) -> None:
        expected = Identity(5, 8, 1, 4, "head", 1234)
        assert identity(TORCHRUN) == expected
        assert identity({**SLURM, **TORCHRUN}) == expected, "torchrun inside of srun"

    def test_slurm(self) -> None:
        port = 20000 + 1234567 % 12000
        assert identity(SLURM) == Identity(5, 8, 1, 4, "gpu03", port)

    def test_slurm_with_an_address(self) -> None:
        given = {**SLURM, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4321"}
        me = identity(given)
        assert me is not None and (me.address, me.port) == ("127.0.0.1", 4321)

    def test_slurm_by_hand(self) -> None:
        me = identity({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"})
        assert me == Identity(1, 2, 1, 2, "127.0.0.1", 20000)

    def test_the_tasks_of_a_job_meet(self) -> None:
        both = [identity({**SLURM, "SLURM_PROCID": rank}) for rank in ("0", "7")]
        places = {(me.address, me.port) for me in both if me is not None}
        assert len(places) == 1

    @pytest.mark.parametrize(
        ("nodes", "first"),
        [
            ("gpu[03-07,12],cpu1", "gpu03"),
            ("gpu[3,12]", "gpu3"),
            ("gpu[12]", "gpu12"),
            ("gpu7,gpu[3-4]", "gpu7"),
            ("head", "head"),
            ("head-1.cluster,head-2.cluster", "head-1.cluster"),
            ("rack-2-n[001-004]", "rack-2-n001"),
            ("127.0.0.1", "127.0.0.1"),
        ],
    )
    def test_first_host(self, nodes: str, first: str) -> None:
        assert first_host(nodes) == first

    def test_world_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert world_size(LaunchConfig(workers=3)) == 3
        for key, value in SLURM.items():
            monkeypatch.setenv(key, value)
        assert world_size(LaunchConfig(workers=3)) == 8
        assert not is_first()
        monkeypatch.setenv("SLURM_PROCID", "0")
        assert is_first()


class TestTag:
    @staticmethod
    def of(*overrides: str, world: int = 2, method: str = "co2") -> str:
        return tag_from(overrides, world, 2, method)

    def test_nothing_that_matters(self) -> None:
        free = ("train.seed=3", "log.every=1", "checkpoint.keep=9", "runs=/x", "resume=never")
        rest = (
            "data.root=/x",
            "launch.backend=gloo",
            "launch.gpu=h100",
            "hydra.verbose=true",
            "tag=x",
        )
        assert self.of("task=toy", "method=co2", *free, *rest) == "default"

    def test_names(self) -> None:
        assert self.of("co2.tau=3") == "tau3"
        assert self.of("++co2.tau=3") == "tau3"
        assert self.of("optim.lr=1e-3") == "lr1e_3"
        assert self.of("scale=paper") == "paper"
        assert self.of("slowmo.tau=3", method="slowmo") == "tau3"

    def test_order_does_not_matter(self) -> None:
        one, other = "co2.tau=3", "optim.lr=0.1"
        assert self.of(one, other) == self.of(other, one) == "lr0.1-tau3"

    def test_the_workers_of_torchrun(self) -> None:
        assert self.of("co2.tau=3", world=4) == "tau3-workers4"
        assert self.of("co2.tau=3", world=2) == "tau3"

    @pytest.mark.parametrize("value", ["/home/me/text.txt", "../up", "a b", "x:y", "[1,2]", "ü/é"])
    def test_is_a_plain_folder_name(self, value: str) -> None:
        tag = self.of(f"data.path={value}")
        assert not set(tag) & set("/\\ :[],'\"") and tag not in ("", ".", "..")

    def test_paths_of_the_same_name_differ(self) -> None:
        assert self.of("data.path=/a/text") != self.of("data.path=/b/text")

    def test_long_ones_are_cut_and_differ(self) -> None:
        many = [f"co2.key{number}={number}" for number in range(40)]
        one, other = self.of(*many, "co2.z=1"), self.of(*many, "co2.z=2")
        assert one != other and len(one) <= 120

    def test_long_fractions_are_short(self) -> None:
        assert self.of("optim.lr=0.00100000000") == "lr0.001"
        drawn, next_one = "0.30000000000000004", "0.3000000000000001"
        tags = [self.of(f"optim.lr={value}") for value in (drawn, next_one, "0.3")]
        assert len(set(tags)) == 3 and all(len(tag) <= len("lr0.1234_abcdef") for tag in tags)
        assert tags[0] == self.of(f"optim.lr={drawn}0"), "the same number"
        assert len(self.of("optim.lr=-1.2345678901e-05")) <= len("lr_1.235e_05_abcdef")
        assert self.of("train.steps=1234567890") == "steps1234567890"

    def test_a_sweep_never_collides(self) -> None:
        jobs = [
            (
                f"co2.tau={tau}",
                f"optim.lr={lr}",
                f"co2.gap_penalty={gap}",
                f"launch.workers={n}",
            )
            for tau in (1, 11, 111)
            for lr in ("0.1", "0.11", "1e-1")
            for gap in ("none", "gap_aware", "1.5")
            for n in (1, 2)
        ]
        assert len({self.of(*job) for job in jobs}) == len(jobs)


def test_a_manifest_names_every_file(tmp_path: Path) -> None:
    assert checkpoints(tmp_path).save(4, state(4))
    manifest = json.loads((tmp_path / "step_4" / MANIFEST).read_text())
    assert manifest["step"] == 4 and manifest["world"] == 1
    assert {path.name for path in (tmp_path / "step_4").iterdir()} == {MANIFEST, "replica_0"}
    assert [*manifest["sha256"]] == [part()]
    assert [path.name for path in (tmp_path / "step_4" / "replica_0").iterdir()] == [
        "worker_0.safetensors"
    ]
