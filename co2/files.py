"""Files that are whole or absent, also after a crash."""

import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Write a small file aside, fsync and rename it: whole or as before, also after a crash."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
