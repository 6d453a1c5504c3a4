"""metrics.jsonl on a full disk, and in other hands; and what git is asked."""

import json
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from co2.record import provenance
from co2.record.console import Console
from co2.record.metrics import Notice
from co2.record.provenance import Origin
from co2.record.record import FolderRecord, Record
from tests.cli.harness import configured


class Heard(Console):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def print_line(self, line: str) -> None:
        self.lines.append(line)


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file can grow beyond so many bytes: a longer write ends amid a line, with an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def record(tmp_path: Path, heard: Heard) -> FolderRecord:
    return begun(tmp_path, heard, 0)


def begun(tmp_path: Path, heard: Heard, step: int, before: Record | None = None) -> FolderRecord:
    config = configured("log.wandb=disabled", runs=tmp_path / "runs")
    record = FolderRecord(config, 2, "samples", {}, Origin("train.py", ()), heard)
    record.begin(step, before)
    return record


def steps(record: FolderRecord) -> list[int]:
    return [json.loads(line)["step"] for line in (record.folder / "metrics.jsonl").open()]


def test_lines_wait_until_there_is_room(record: FolderRecord, heard: Heard) -> None:
    record.log(Notice(1, "one"))
    size = (record.folder / "metrics.jsonl").stat().st_size
    with room_for(size + 20):
        record.log(Notice(2, "two"))
        record.log(Notice(3, "three"))
        assert steps(record) == [1], "nothing torn is left"
    record.log(Notice(4, "four"))
    assert steps(record) == [1, 2, 3, 4]
    (line,) = heard.lines
    assert line.startswith("step 2: metrics.jsonl cannot be written (File too large)")


def test_a_run_does_not_finish_without_its_lines(record: FolderRecord) -> None:
    record.log(Notice(1, "one"))
    with room_for((record.folder / "metrics.jsonl").stat().st_size + 20):
        record.log(Notice(2, "two"))
        with pytest.raises(OSError, match="File too large"):
            record.finish(None)  # type: ignore[arg-type]
    assert not (record.folder / "summary.json").exists()


def test_who_was_given_up_adds_no_more_lines(
    record: FolderRecord, heard: Heard, tmp_path: Path
) -> None:
    """It was out of reach for a while, and trains on until it learns that the others went on."""
    record.log(Notice(1, "one"))
    others = Record()
    for step in (1, 2, 3):
        others.log(Notice(step, "of another worker"))
    successor = begun(tmp_path, heard, 3, others)
    record.log(Notice(2, "late"))
    successor.log(Notice(4, "four"))
    assert steps(successor) == [1, 2, 3, 4]


def test_also_when_nothing_was_written_yet(
    record: FolderRecord, heard: Heard, tmp_path: Path
) -> None:
    successor = begun(tmp_path, heard, 0)
    record.log(Notice(1, "late"))
    successor.log(Notice(1, "one"))
    assert steps(successor) == [1]


def test_git_is_asked_and_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was killed while git renewed its index left a lock, with which git refuses to
    commit."""
    asked = tmp_path / "provenance.py"
    asked.write_text("")
    author = ("-c", "user.name=A", "-c", "user.email=a@b.org")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "all")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    os.utime(asked, (1, 1))  # what git knows of the file is no longer so
    index = (tmp_path / ".git" / "index").read_bytes()
    monkeypatch.setattr(provenance, "__file__", str(asked))
    assert len(provenance.git()["commit"]) == 40 and not provenance.git()["dirty"]
    assert (tmp_path / ".git" / "index").read_bytes() == index
