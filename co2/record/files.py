"""Files that are whole or absent, also after a crash, and the whole lines of one that grows."""

import json
from pathlib import Path
from typing import Any

from co2.whole import durable

DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading a damaged file of JSON or YAML raises."""
CHECKPOINT_FORMAT = 6
"""Stands in the manifest of every checkpoint. It grows when older ones can no longer be read."""


def write_durably(path: Path, text: str) -> None:
    """Write a small file as `durable` does."""
    with durable(path) as file:
        file.write(text.encode())


def whole_lines(path: Path) -> list[Any]:
    """The values of a file of JSON lines, such as metrics.jsonl. It may still grow: a
    last line of which only the beginning is there does not count. Empty where there is no file.
    Any: JSON."""
    texts = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(text) for text in texts if text.endswith("\n")]
