"""What `make test-fast` and `make test` leave out is there: a renamed test would come back."""

import re
from pathlib import Path

from tests.conftest import LONG, SLOW

ROOT = Path(__file__).parents[1]


def is_there(name: str) -> bool:
    path, *parts = name.partition("[")[0].split("::")
    text = (ROOT / path).read_text() if (ROOT / path).exists() else ""
    found = [re.search(rf"^ *(def|class) {part}\b", text, re.MULTILINE) for part in parts]
    return bool(text) and all(found)


def test_what_is_named_is_there() -> None:
    assert [name for name in (*LONG, *SLOW) if not is_there(name)] == []
