"""What saving, stopping and starting are made of, piece by piece."""

import json
import math
import os
import random
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from co2.comm.mesh import Mesh
from co2.errors import ConfigError
from co2.randomness import random_states, restore_random_states
from co2.train import checkpoint, state_file
from co2.train.checkpoint import MANIFEST, Checkpoints
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


def test_write_durably_replaces_whole_files_only(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    checkpoint.write_durably(path, "old")
    for moment in (1, 2):
        assert dies_at(moment, lambda: checkpoint.write_durably(path, "new" * 999))
        assert path.read_text() == "old"
    assert dies_at(3, lambda: checkpoint.write_durably(path, "new")), "its name is synced as well"
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.json"]


def test_a_manifest_names_every_file(tmp_path: Path) -> None:
    assert checkpoints(tmp_path).save(4, state(4))
    manifest = json.loads((tmp_path / "step_4" / MANIFEST).read_text())
    assert manifest["step"] == 4 and manifest["world"] == 1
    assert {path.name for path in (tmp_path / "step_4").iterdir()} == {MANIFEST, "replica_0"}
    assert [*manifest["sha256"]] == [part()]
    assert [path.name for path in (tmp_path / "step_4" / "replica_0").iterdir()] == [
        "worker_0.safetensors"
    ]
