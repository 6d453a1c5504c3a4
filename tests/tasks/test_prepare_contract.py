"""What holds for every data set of `python -m tasks.prepare`. A data set is covered by being in
SETS; its small source stands in tests/tasks/small_sets.py."""

import errno
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from co2.errors import ConfigError
from tasks.prepare.__main__ import SETS, main
from tests.grids import nonempty
from tests.tasks.build import drawn
from tests.tasks.conftest import Refused
from tests.tasks.small_sets import GIVEN, Given


@pytest.fixture(params=GIVEN)
def name(request: pytest.FixtureRequest) -> str:
    """Every set."""
    return request.param


def test_every_set_has_a_source() -> None:
    assert {name.split()[0] for name in GIVEN} == set(nonempty(SETS))


def files(folder: Path) -> dict[str, bytes]:
    """Contents of all files below a folder, also of hidden ones."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def in_place(folder: Path) -> dict[str, bytes]:
    """Without what is still written aside."""
    return {name: content for name, content in files(folder).items() if not name.startswith(".")}


def command(given: Given, root: Path) -> list[str]:
    return [*given.options, "--root", str(root)]


def prepared(given: Given, root: Path) -> Path:
    """What the command makes."""
    assert main(command(given, root)) == 0
    return root / given.made


def test_the_task_trains_on_it(
    given: Given, tmp_path: Path, text_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And both ways of looking through it find it sound."""
    root = tmp_path / "root"
    made = prepared(given, root)
    assert "train with: task=" in capfd.readouterr().out
    assert list(made.parent.iterdir()) == [made], "nothing else is left"
    for look in ("--check", "--verify"):
        assert main([given.options[0], look, str(made)]) == 0
        assert capfd.readouterr().out.splitlines()[-1] == f"{made}: sound"
    task = given.task(root, text_file)
    task.setup(1)
    assert task.fingerprint()
    (batch,) = drawn(task)
    assert task.loss(task.model(), batch).isfinite()


def test_the_task_says_how_to_make_it(given: Given, tmp_path: Path, text_file: Path) -> None:
    """In one line, before anything is written."""
    root = tmp_path / "root"
    with pytest.raises(ConfigError) as caught:
        given.wanted(root, text_file).setup(1)
    line = str(caught.value)
    assert f"-m tasks.prepare {given.options[0]} " in line and str(root) in line
    assert "\n" not in line and not (root / given.made).exists()


def test_run_twice_it_does_nothing(given: Given, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert main(command(given, root)) == 0
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    for file in given.files:
        file.write_bytes(b"not read again")
    assert main(command(given, root)) == 0
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


class Disturbed:
    """Runs the command in a process of its own, and disturbs it as it opens a file to write, or
    renames one, below its root for the `at`-th time. Python tells of each change before it happens.

    Args:
        how: "killed", while a file is half written; "stopped", by Ctrl-C; "full", from then on no
            file can be written; "watched", not at all.
    """

    def __init__(self, root: Path, at: int, how: str) -> None:
        self.root, self.at, self.how = str(root), at, how
        self.changes, self.busy = 0, False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.busy or event not in ("open", "os.rename"):
            return
        path = arguments[0]
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if not isinstance(path, str | os.PathLike) or not str(path).startswith(self.root):
            return
        if str(path).endswith(".lock"):
            return
        self.changes += 1
        if self.changes == self.at or (self.changes > self.at and self.how == "full"):
            self.disturb(Path(path))

    def disturb(self, path: Path) -> None:
        if self.how == "full":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        if self.how == "stopped":
            raise KeyboardInterrupt
        if self.how == "killed":
            self.busy = True
            # Parquet files are opened where Python does not see it: they are torn at their rename.
            inside = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
            (inside or [path])[-1].write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)

    def run(self, words: list[str], told: Connection) -> None:
        sys.addaudithook(self)
        status = main(words)
        told.send(self.changes)
        sys.stderr.flush()
        os._exit(status)


def disturbed(words: list[str], root: Path, at: int, how: str) -> tuple[int, int]:
    """The exit status, negative for a signal; and how often something was changed, if it ended."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=Disturbed(root, at, how).run, args=(words, there))
    process.start()
    there.close()
    try:
        changes = here.recv()
    except EOFError:
        changes = 0
    process.join()
    return process.exitcode, changes


STATUS = {"killed": -signal.SIGKILL, "stopped": 130, "full": 2}


def test_disturbed_it_is_gone_on_with(
    name: str, given: Given, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Killed early, amid its work and at its end; otherwise disturbed at one of these times, which
    the sets have in turn. What is in place then is whole, and the next run ends with what an
    undisturbed one makes."""
    whole = tmp_path / "whole"
    status, changes = disturbed(command(given, whole), whole, 0, "watched")
    assert status == 0 and changes >= 3
    expected = files(whole / given.made)
    times = (2, changes // 2, changes)
    turn = list(GIVEN).index(name)
    others = (("stopped", times[turn % 3]), ("full", times[(turn + 1) % 3]))
    for how, at in (*product(["killed"], times), *others):
        root = tmp_path / f"{how}{at}"
        capfd.readouterr()
        assert disturbed(command(given, root), root, at, how)[0] == STATUS[how]
        if how == "stopped":
            assert "stopped; the same command goes on where it stopped" in capfd.readouterr().err
        if how == "full":
            (line,) = re.findall("^error: .*", capfd.readouterr().err, re.MULTILINE)
            assert line.endswith("No space left on device; make room or choose another")
        assert in_place(root / given.made).items() <= expected.items()
        status, again = disturbed(command(given, root), root, 0, "watched")
        assert status == 0
        assert files(root / given.made) == expected
        left = {path.name for path in (root / given.made).parent.iterdir()}
        assert left == {path.name for path in (whole / given.made).parent.iterdir()}
        if given.goes_on:
            assert again <= changes - (at - 2) // 2, "what is done is not done again"


def cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * 2 // 3])


def remove(file: Path) -> None:
    """With the other parts of the same table."""
    for part in nonempty(file.parent.glob(f"{file.name.split('-0')[0]}*")):
        part.unlink()


@pytest.mark.parametrize("damage", [cut, remove])
def test_a_damaged_source_is_one_line(
    given: Given, tmp_path: Path, damage: Callable[[Path], None], refused: Refused
) -> None:
    """Which names an option. Nothing that is half is in place, and with the whole source the same
    command ends well."""
    expected = files(prepared(given, tmp_path / "whole"))
    root = tmp_path / "root"
    for file in given.files:
        beside = files(file.parent)
        damage(file)
        assert refused(command(given, root)).startswith("error: --"), file
        assert in_place(root / given.made).items() <= expected.items()
        for name, content in beside.items():
            (file.parent / name).write_bytes(content)
    assert files(prepared(given, root)) == expected


def test_a_root_that_cannot_be_written(given: Given, tmp_path: Path, refused: Refused) -> None:
    """It is told before the work, where a source may take hours to load."""
    root = tmp_path / "root"
    root.write_text("a file")
    if given.root_first:
        for file in given.files:
            file.unlink()
    line = refused(command(given, root))
    assert line.startswith(f"error: --root={root}: ") and line.endswith("choose another")
    assert root.read_text() == "a file"


def changed(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_damage_is_found(
    given: Given, tmp_path: Path, refused: Refused, capfd: pytest.CaptureFixture[str]
) -> None:
    """By --verify, which names the file; and a folder that is not there is one line."""
    made, name = prepared(given, tmp_path / "root"), given.options[0]
    for pattern in nonempty(given.spoilt):
        file = nonempty(sorted(made.rglob(pattern)))[-1]
        content = file.read_bytes()
        damage = changed if file.suffix == ".bin" else cut
        damage(file)
        capfd.readouterr()
        assert main([name, "--verify", str(made)]) in (1, 2)
        told = capfd.readouterr()
        assert file.name.split("-0")[0] in told.out + told.err
        file.write_bytes(content)
    capfd.readouterr()
    assert main([name, "--verify", str(made)]) == 0
    assert refused([name, "--verify", str(tmp_path / "none")]).endswith(
        "none: no such file or folder"
    )
