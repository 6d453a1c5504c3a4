"""Files that are whole or absent, also after a crash."""

import os
from pathlib import Path

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
