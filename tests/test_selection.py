"""What `make test-fast` and `make test` leave out is there."""

import re
from pathlib import Path

import pytest

from tests.conftest import LONG, SLOW

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", [*LONG, *SLOW])
def test_what_is_named_is_there(name: str) -> None:
    path, *parts = name.split("::")
    text = (ROOT / path).read_text()
    for part in parts:
        assert re.search(rf"^ *(def|class) {part}\b", text, re.MULTILINE), f"no {part} in {path}"
