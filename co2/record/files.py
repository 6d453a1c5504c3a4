"""Files that are whole or absent, also after a crash, and the whole lines of one that grows."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading a damaged file of JSON or YAML raises."""
CHECKPOINT_FORMAT = 6
"""Stands in the manifest of every checkpoint. It grows when older ones can no longer be read."""


def write_durably(path: Path, text: str) -> None:
    """Write a small file as `durable` does."""
    with durable(path) as file:
        file.write(text.encode())


@contextmanager
def durable(path: Path) -> Iterator[IO[bytes]]:
    """A file to write in, aside; it is fsynced and renamed at the end. After a crash the file is
    whole, or as it was before. Raises `OSError`, which names the file and leaves nothing aside."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def whole_lines(path: Path) -> list[Any]:
    """The values of a file of JSON lines, such as metrics.jsonl. It may still grow: a
    last line of which only the beginning is there does not count. Empty where there is no file.
    Any: JSON."""
    texts = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(text) for text in texts if text.endswith("\n")]
