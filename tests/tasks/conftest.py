"""Text to train on that is quick to tokenize, and small sources of the public data sets."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Refused = Callable[[list[str]], str]


def story(num_words: int, seed: int = 0) -> str:
    """A text with structure enough for a BPE; tabs, blank lines, CRLF and non-ASCII included."""
    source = random.Random(seed)
    words = ["replica", "anchor", "über", "round", "数", "step", "a", "the", "of", "gap"]
    ends = [" ", " ", " ", ", ", "\n", "\n\n\t", "\r\n"]
    return "".join(source.choice(words) + source.choice(ends) for _ in range(num_words))


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_bytes(story(20_000).encode())
    return path


@pytest.fixture
def given(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The source of a data set, by its name."""
    from tests.tasks.small_sets import GIVEN

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "given").mkdir()
    return GIVEN[name](tmp_path / "given", monkeypatch)


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Refused:
    """Runs `python -m tasks.prepare` with some words, and gives the one line in which it refuses
    them on stderr; progress aside."""
    from tasks.prepare.__main__ import main

    def run(words: list[str]) -> str:
        capfd.readouterr()
        assert main(words) == 2
        told = capfd.readouterr().err.splitlines()
        (line,) = [line for line in told if line.startswith("error: ")]
        assert told[-1] == line and "Traceback" not in "".join(told)
        return line

    return run
