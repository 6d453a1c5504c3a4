"""What `make test-fast` and `make test` leave out is there: a renamed test would come back."""

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import LONG, SLOW
from tests.durations import ROOT, is_there, read

SUITE = """
import time

import pytest


@pytest.fixture(scope="module")
def costly():
    time.sleep(1.1)


def test_quick():
    pass


@pytest.mark.parametrize("seconds", [0.6, 0.7])
def test_both(seconds):
    time.sleep(seconds)


class TestShared:
    def test_first(self, costly):
        pass

    def test_second(self, costly):
        pass
"""


def test_what_is_named_is_there() -> None:
    names = (*LONG, *SLOW)
    assert len(names) > 50
    gone = [name for name in names if not is_there(name)]
    assert gone == [], "python -m tests.durations writes those of durations.csv anew"


def test_long_tests_are_written(tmp_path: Path) -> None:
    """All cases of a function count, and what a fixture takes counts for all that use it."""
    (tmp_path / "test_some.py").write_text(SUITE)
    file, kept = tmp_path / "durations.csv", "tests/test_selection.py::test_what_is_named_is_there"
    file.write_text(f"test,seconds\n{kept},3.0\ntests/test_gone.py::test_old,9.0\n")
    words = ["pytest", "-q", "-p", "tests.durations", "--durations-file", file, "-c", os.devnull]
    ran = subprocess.run(
        [sys.executable, "-m", *words, f"--rootdir={tmp_path}", tmp_path], cwd=ROOT
    )
    assert ran.returncode == 0
    assert read(file).keys() == {
        "test_some.py::TestShared::test_first",
        "test_some.py::TestShared::test_second",
        "test_some.py::test_both",
        kept,
    }
