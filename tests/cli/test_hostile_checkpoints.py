"""Checkpoints that are damaged, or made by somebody who means harm.

Nothing in them is run, no file elsewhere is read or removed, and the one before is used.
"""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from co2.train import checkpoint
from co2.train.checkpoint import MANIFEST
from co2.train.replica import ReplicaState
from co2.train.shards import Planner, Reader
from tests.cli.refused import MARK, Payload, files, pickled
from tests.cli.test_checkpoint import assert_state, checkpoints, state
from tests.grids import first_of_each

Spoil = Callable[[Path], object]
DEEP = "[" * 100_000
"""JSON that exhausts the reader's stack."""


def manifest(**changes: Any) -> Spoil:
    """Other values in a checkpoint's manifest."""

    def spoil(folder: Path) -> None:
        path = folder / MANIFEST
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return spoil


def whole_manifest(text: str) -> Spoil:
    return lambda folder: (folder / MANIFEST).write_text(text)


def rank_file(make: Callable[[Path], bytes], summed: bool = True) -> Spoil:
    """Another file of worker 0, and its checksum in the manifest."""

    def spoil(folder: Path) -> None:
        data = make(folder)
        (folder / "rank_0.pt").write_bytes(data)
        if summed:
            manifest(sha256={"rank_0.pt": hashlib.sha256(data).hexdigest()})(folder)

    return spoil


def of_torch(make: Callable[[Path], object]) -> Callable[[Path], bytes]:
    """The file that torch.save makes of an object."""

    def data(folder: Path) -> bytes:
        torch.save(make(folder), path := folder / "made")
        return path.read_bytes()

    return data


def also_named(name: str) -> Spoil:
    """A further file in the manifest: one that is elsewhere, with its own checksum."""

    def spoil(folder: Path) -> None:
        sums = json.loads((folder / MANIFEST).read_text())["sha256"]
        place = name.replace("ROOT", str(folder.parents[1]))
        digest = hashlib.sha256((folder.parents[1] / "secret").read_bytes()).hexdigest()
        manifest(sha256={**sums, place: digest})(folder)

    return spoil


def linked(name: str) -> Spoil:
    """A file of the checkpoint lies elsewhere, behind a link, and is sound."""

    def spoil(folder: Path) -> None:
        shutil.copy(folder / name, target := folder.parents[1] / "elsewhere")
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return spoil


def folder_linked(folder: Path) -> None:
    folder.rename(target := folder.parents[1] / "moved")
    folder.symlink_to(target)


def a_pipe(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)


def of_here(folder: Path) -> Path:
    """Where a payload in a checkpoint leaves its mark."""
    return folder.parents[1]


CHECKPOINTS: dict[str, tuple[Spoil, str]] = {
    "torch.save of a payload": (rank_file(of_torch(lambda f: Payload(of_here(f)))), "be read"),
    "payload amid the state": (
        rank_file(of_torch(lambda f: {**state(2), "more": Payload(of_here(f))})),
        "cannot be read",
    ),
    "a bare pickle": (rank_file(lambda f: pickled(of_here(f))), "cannot be read"),
    "a bare pickle, not summed": (rank_file(lambda f: pickled(of_here(f)), False), "checksum"),
    "empty, and summed": (rank_file(lambda f: b""), "cannot be read"),
    "cut, and summed": (rank_file(lambda f: (f / "rank_0.pt").read_bytes()[:-99]), "be read"),
    "no state": (rank_file(of_torch(lambda f: [1, 2])), "holds no state"),
    "a file by a link": (linked("rank_0.pt"), "lies elsewhere"),
    "a manifest by a link": (linked(MANIFEST), "lies elsewhere"),
    "a folder by a link": (folder_linked, "lies elsewhere"),
    "a manifest that is a pipe": (a_pipe, "is no file"),
    "step": (manifest(step=9), "it is of step 9"),
    "step as a text": (manifest(step="2"), "it is of step 2"),
    "no step": (manifest(step=None), "it is of step None"),
    "world": (manifest(world=7), "saved by 7 workers"),
    "world as a list": (manifest(world=[1]), "saved by [1] workers"),
    "world with a line end": (manifest(world="1\nerror"), r"saved by 1\nerror workers"),
    "no checksums": (manifest(sha256=None), MANIFEST),
    "checksums as a list": (manifest(sha256=["rank_0.pt"]), MANIFEST),
    "another's checksums": (manifest(sha256={"rank_1.pt": "0"}), MANIFEST),
    "a name with ..": (also_named("../../secret"), "lies elsewhere"),
    "a shared name with ..": (also_named("replica_0/../../../secret"), "lies elsewhere"),
    "an absolute name": (also_named("ROOT/secret"), "lies elsewhere"),
    "a name with NUL": (manifest(sha256={"rank_0.pt": "0", "a\0b": "0"}), MANIFEST),
    "a list": (whole_manifest("[]"), MANIFEST),
    "null": (whole_manifest("null"), MANIFEST),
    "a deep list": (whole_manifest(DEEP), MANIFEST),
    "no UTF-8": (lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe{"), MANIFEST),
}


@pytest.mark.parametrize("kind", first_of_each(CHECKPOINTS, lambda kind: CHECKPOINTS[kind][1]))
def test_checkpoint(tmp_path: Path, kind: str) -> None:
    """It is said in one line and set aside, and the one before is used."""
    spoil, says = CHECKPOINTS[kind]
    (tmp_path / "secret").write_text("not a checkpoint's")
    lines: list[str] = []
    saver = checkpoints(tmp_path / "checkpoints", lines=lines)
    for step in (1, 2):
        assert saver.save(step, state(step))
    spoil(tmp_path / "checkpoints" / "step_2")
    before = {n: d for n, d in files(tmp_path).items() if not n.startswith("checkpoints")}
    assert_state(saver.load(), 1)
    (line,) = lines
    assert line.startswith("checkpoint step_2 is damaged (") and says in line
    assert line.isprintable()
    assert saver.steps() == [1]
    for step in (2, 3, 4):  # what was set aside goes, too, and nothing else
        assert saver.save(step, state(step))
    assert {n: d for n, d in files(tmp_path).items() if not n.startswith("checkpoints")} == before
    assert not (tmp_path / MARK).exists()


@pytest.mark.parametrize("name", ["step_²", "step_٣", "step_-1", "step_1e3", "step_"])
def test_names_that_are_no_step(tmp_path: Path, name: str) -> None:
    saver = checkpoints(tmp_path)
    (tmp_path / name).mkdir()
    assert saver.steps() == [] and saver.load() is None
    assert (tmp_path / name).exists()


def parts(folder: Path, state: dict[str, Any]) -> Path:
    """What the workers of a replica save together, by a single one."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder


def described(folder: Path, change: Callable[[Any], object]) -> None:
    """Another description of what is saved."""
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))


def elsewhere(found: Any) -> dict[Any, Any]:
    """What is saved lies outside the folder."""
    for info in found.storage_data.values():
        info.relative_path = "../../../secret"
    return found.storage_data


class Shared:
    """What the workers of a replica save together, without workers."""

    check = ReplicaState.check

    def __init__(self) -> None:
        self.read_from: list[Path] = []

    def state(self) -> dict[str, Any]:
        return {"weight/a": torch.zeros(3)}

    def write(self, folder: Path, state: dict[str, Any]) -> None:
        parts(folder, state)

    def read(self, folder: Path) -> None:
        self.read_from.append(folder)


class TestParts:
    def test_sound_ones_are_read(self, tmp_path: Path) -> None:
        saved = {"weight/a": torch.arange(6.0), "inner/a/step": 3, "inner/a/none": None}
        folder = parts(tmp_path / "replica_0", saved)
        found = {"weight/a": torch.zeros(6), "inner/a/step": 0, "inner/a/none": 1}
        dcp.load(found, storage_reader=Reader(folder), planner=Planner(), no_dist=True)
        assert torch.equal(found.pop("weight/a"), saved.pop("weight/a"))  # type: ignore[arg-type]
        assert found == saved

    def test_a_payload_is_not_run(self, tmp_path: Path) -> None:
        folder = parts(tmp_path / "replica_0", {"weight/a": torch.zeros(3)})
        described(folder, lambda found: setattr(found, "planner_data", Payload(tmp_path)))
        with pytest.raises(pickle.UnpicklingError, match="is no part of a checkpoint"):
            Reader(folder).read_metadata()
        (folder / ".metadata").write_bytes(pickled(tmp_path))
        with pytest.raises(pickle.UnpicklingError):
            Reader(folder).read_metadata()
        assert not (tmp_path / MARK).exists()

    @pytest.mark.parametrize("kind", ["payload", "elsewhere", "by a link", "cut"])
    def test_they_cost_one_checkpoint(self, tmp_path: Path, kind: str) -> None:
        """Their checksums are right."""
        lines: list[str] = []
        saver = checkpoints(tmp_path / "checkpoints", lines=lines)
        saver.shared = Shared()  # type: ignore[assignment]
        for step in (1, 2):
            assert saver.save(step, state(step))
        folder = tmp_path / "checkpoints" / "step_2"
        path = folder / "replica_0" / ".metadata"
        if kind == "payload":
            described(path.parent, lambda found: setattr(found, "planner_data", Payload(tmp_path)))
        elif kind == "elsewhere":
            described(path.parent, lambda found: setattr(found, "storage_data", elsewhere(found)))
        elif kind == "cut":
            path.write_bytes(path.read_bytes()[:-9])
        else:
            path.rename(tmp_path / "metadata")
            path.symlink_to(tmp_path / "metadata")
        sums = json.loads((folder / MANIFEST).read_text())["sha256"]
        sums["replica_0/.metadata"] = hashlib.sha256(path.read_bytes()).hexdigest()
        manifest(sha256=sums)(folder)
        assert_state(saver.load(), 1)
        assert len(lines) == 1 and "step_2 is damaged" in lines[0] and lines[0].isprintable()
        assert saver.shared.read_from == [tmp_path / "checkpoints" / "step_1" / "replica_0"]
        assert not (tmp_path / MARK).exists()

    @pytest.mark.parametrize("place", ["../secret", "/etc/passwd", "..", "a/../../secret"])
    def test_a_file_elsewhere_is_not_read(self, tmp_path: Path, place: str) -> None:
        folder = parts(tmp_path / "replica_0", {"weight/a": torch.zeros(3)})

        def change(found: Any) -> None:
            for info in found.storage_data.values():
                info.relative_path = place

        described(folder, change)
        with pytest.raises(pickle.UnpicklingError, match="names a file elsewhere"):
            Reader(folder).read_metadata()

    def test_a_tensor_that_is_called_a_value(self, tmp_path: Path) -> None:
        """PyTorch itself would load it as any pickle."""
        torch.save(Payload(tmp_path), tmp_path / "payload")
        folder = parts(tmp_path / "replica_0", {"weight/a": "a value"})
        data = (tmp_path / "payload").read_bytes()
        (file,) = folder.glob("*.distcp")
        file.write_bytes(data)

        def change(found: Any) -> None:
            assert found.state_dict_metadata == {"weight/a": BytesStorageMetadata()}
            for info in found.storage_data.values():
                info.offset, info.length = 0, len(data)

        described(folder, change)
        own = {"storage_reader": Reader(folder), "no_dist": True}
        with pytest.raises(CheckpointException, match="UnpicklingError: Weights only"):
            dcp.load({"weight/a": ""}, planner=Planner(), **own)
        assert not (tmp_path / MARK).exists()
        dcp.load({"weight/a": ""}, **own)  # PyTorch's own planner
        assert (tmp_path / MARK).exists()


def test_unread_files_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is refused by its manifest is not even opened."""
    saver = checkpoints(tmp_path)
    assert saver.save(1, state(1))
    manifest(world=2)(tmp_path / "step_1")
    monkeypatch.setattr(checkpoint, "_sha256", lambda path: pytest.fail(f"{path} was read"))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was loaded"))
    assert saver.load() is None
