"""Text to train on: a small one that is quick to tokenize, and the embedded one, once a session."""

import random
from pathlib import Path

import pytest


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
