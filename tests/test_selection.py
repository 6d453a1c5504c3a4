"""What `make test-fast` leaves out is there."""

import re
from pathlib import Path

import pytest

from tests.conftest import LONG

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", LONG)
def test_what_is_named_long_is_there(name: str) -> None:
    path, *parts = name.split("::")
    text = (ROOT / path).read_text()
    for part in parts:
        assert re.search(rf"^ *(def|class) {part}\b", text, re.MULTILINE), f"no {part} in {path}"
