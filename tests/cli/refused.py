"""What a refusal looks like, and what a hostile file would do if anybody ran what is in it."""

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from co2.errors import REFUSED

MARK = "executed"
"""Folder that a payload makes where it is run."""


class Payload:
    """An object whose pickle makes a folder when it is loaded without care."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / MARK

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.mark,)


def pickled(folder: Path) -> bytes:
    """A pickle that makes the mark in `folder`."""
    return pickle.dumps(Payload(folder))


def tagged(folder: Path) -> str:
    """A YAML value that makes the mark in `folder`."""
    return f"!!python/object/apply:os.mkdir [{folder / MARK}]"


def files(folder: Path) -> dict[str, bytes]:
    """Every file and folder below a folder; what is a link is not followed."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
        if not path.is_fifo()
    }


def refused(
    program: Callable[[list[str]], object], words: list[str], capsys: pytest.CaptureFixture[str]
) -> str:
    """What a program says of a command line: one line after `error: `, with status 2."""
    capsys.readouterr()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        try:
            status = program(words)
        except SystemExit as ended:
            status = ended.code
    shown = [found for found in warned if issubclass(found.category, UserWarning)]
    assert shown == [], "which a person would see as well"
    printed = capsys.readouterr()
    assert status == REFUSED, printed
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ") and line.isprintable()
    return line.removeprefix("error: ")
