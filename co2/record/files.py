"""Files that are whole or absent, also after a crash, and the whole lines of one that grows."""

import json
import os
from pathlib import Path
from typing import Any

CHECKPOINT_FORMAT = 4
"""Stands in the manifest of every checkpoint. It grows when older ones can no longer be read."""


def write_durably(path: Path, text: str) -> None:
    """Write a small file aside, fsync it and rename it: after a crash the file is whole, or as it
    was before."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)


def whole_lines(path: Path) -> list[Any]:
    """The values of a file of JSON lines, such as metrics.jsonl. It may still grow: a
    last line of which only the beginning is there does not count. Empty where there is no file.
    Any: JSON."""
    texts = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(text) for text in texts if text.endswith("\n")]
