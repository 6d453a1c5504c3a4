"""Checkpoints that are damaged, or made by somebody who means harm.

Nothing in them is run, no file elsewhere is read or removed, and the one before is used.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save

from co2.errors import ConfigError
from co2.train import checkpoint, state_file
from co2.train.checkpoint import MANIFEST
from tests.cli.refused import MARK, Payload, files, pickled
from tests.cli.test_checkpoint import assert_state, checkpoints, part, state
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


def of_worker(make: Callable[[Path], bytes], summed: bool = True) -> Spoil:
    """Another file of worker 0, and its checksum in the manifest."""

    def spoil(folder: Path) -> None:
        data = make(folder)
        (folder / part()).write_bytes(data)
        if summed:
            manifest(sha256={part(): hashlib.sha256(data).hexdigest()})(folder)

    return spoil


def of_torch(make: Callable[[Path], object]) -> Callable[[Path], bytes]:
    """The file that torch.save makes of an object."""

    def data(folder: Path) -> bytes:
        torch.save(make(folder), path := folder / "made")
        return path.read_bytes()

    return data


def says(values: str) -> Spoil:
    """A file of safetensors with these values in its head, in place of JSON."""
    return of_worker(lambda folder: save({"a": torch.zeros(3)}, {"co2": values}))


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
    "torch.save of a payload": (of_worker(of_torch(lambda f: Payload(of_here(f)))), "be read"),
    "a bare pickle": (of_worker(lambda f: pickled(of_here(f))), "cannot be read"),
    "a bare pickle, not summed": (of_worker(lambda f: pickled(of_here(f)), False), "checksum"),
    "empty, and summed": (of_worker(lambda f: b""), "cannot be read"),
    "cut, and summed": (of_worker(lambda f: (f / part()).read_bytes()[:-9]), "cannot be read"),
    "no values": (of_worker(lambda f: save({"a": torch.zeros(3)})), "cannot be read"),
    "no JSON": (says("{'step': 2}"), "cannot be read (JSONDecodeError"),
    "deep JSON": (says(DEEP), "cannot be read (RecursionError"),
    "no state": (says("[1, 2]"), "holds no state"),
    "a tensor that is not there": (says('{"b": {"$tensor": "b"}}'), "cannot be read (KeyError"),
    "a tensor without a name": (says('{"b": {"$tensor": [1]}}'), "cannot be read (TypeError"),
    "entries that are none": (says('{"b": {"$entries": [1]}}'), "cannot be read (TypeError"),
    "a file by a link": (linked(part()), "lies elsewhere"),
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
    "checksums as a list": (manifest(sha256=[part()]), MANIFEST),
    "another's checksums": (manifest(sha256={part(1): "0"}), part()),
    "a name with ..": (also_named("../../secret"), "lies elsewhere"),
    "a shared name with ..": (also_named("replica_0/../../../secret"), "lies elsewhere"),
    "an absolute name": (also_named("ROOT/secret"), "lies elsewhere"),
    "a name with NUL": (manifest(sha256={part(): "0", "a\0b": "0"}), MANIFEST),
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


def test_another_workers_file_is_read_with_as_much_care(tmp_path: Path) -> None:
    """Of the same replica: its file may hold what this worker does not."""
    saved = {"co2": json.dumps({"weight": {"$tensor": "weight"}})}
    (tmp_path / "own").write_bytes(save({}, saved))
    (tmp_path / "other").write_bytes(save({"weight": torch.arange(3.0)}, {}))
    found = state_file.read(tmp_path / "own", [tmp_path / "other"])
    assert torch.equal(found["weight"], torch.arange(3.0))
    (tmp_path / "other").write_bytes(of_torch(lambda _: Payload(tmp_path))(tmp_path))
    with pytest.raises(SafetensorError):
        state_file.read(tmp_path / "own", [tmp_path / "other"])
    assert not (tmp_path / MARK).exists()


def test_unread_files_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is refused by its manifest is not even opened."""
    saver = checkpoints(tmp_path)
    assert saver.save(1, state(1))
    manifest(world=2)(tmp_path / "step_1")
    monkeypatch.setattr(checkpoint, "_sha256", lambda path: pytest.fail(f"{path} was read"))
    monkeypatch.setattr(state_file, "read", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(ConfigError, match="saved by 2 workers"):
        saver.load()
