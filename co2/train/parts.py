"""Part: what a worker has written of a checkpoint, as it tells worker 0, which publishes the whole.

The workers share a file system, so they tell by a file, and nobody needs a process group, in which
everybody would have to come to the same place at the same time.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from co2.record.files import write_durably


@dataclass(frozen=True)
class Part:
    """One worker's part of a checkpoint."""

    sums: dict[str, str]
    """sha256 of the files that this worker writes or checks, by name."""
    error: str
    """Why it could not be written, in one line; empty if it is whole."""

    def tell(self, folder: Path, rank: int) -> None:
        """Leave this in the folder of a checkpoint, for worker 0. Raises `OSError`."""
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(_path(folder, rank), json.dumps(asdict(self)))


def told(folder: Path, ranks: Iterable[int]) -> dict[int, Part]:
    """The parts that those of the workers have told of that are done."""
    found = {}
    for rank in ranks:
        try:
            found[rank] = Part(**json.loads(_path(folder, rank).read_text()))
        except FileNotFoundError:
            continue
    return found


def forget(folder: Path, ranks: Iterable[int]) -> None:
    """Remove what the workers have told."""
    for rank in ranks:
        _path(folder, rank).unlink(missing_ok=True)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.json"
