"""Batches that are sampled before they are trained on, and kept on disk.

What will be needed is then known: which nodes are popular, and when each is needed again. A plan is
a folder that appears whole:

    plan.json       written last: what the plan was made for, and where records begin
    sampled.bin     a record for each batch: nodes, and each layer's starts and sources
    notes.bin       a record for each batch: a number for each of its nodes, which the store chooses
                    as it finishes the plan, with other files of its own

Plans stay for runs to come with the same batches, whatever their method. A worker that makes a plan
removes those that were used longest ago, until what is left is within its limit.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from co2.atomic import locked, to_disk, written_aside
from co2.errors import ConfigError
from tasks.graph.batches import Batches
from tasks.graph.direct import Readers
from tasks.graph.folder import neighbour_type
from tasks.graph.sampling import Layer, Neighbourhood
from tasks.graph.verified import Records, RecordsWriter, Torn
from tasks.shared.progress import progress

FORMAT = 1
"""Of the files. Plans of others are not used."""
_NOTE = np.dtype(np.int32)


class Plan:
    """An open plan, which nobody removes as long as it is open.

    Args:
        folder: where it is.
        key: what it was made for.
        readers: threads that read.
    Raises:
        Torn: it is not there, or not whole.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any], readers: Readers) -> None:
        self.folder, self.readers = folder, readers
        try:
            self._lock = _use(folder)
            self.meta: dict[str, Any] = json.loads((folder / "plan.json").read_text())
            if self.meta["key"] != json.loads(json.dumps(key)):
                raise Torn(f"{folder} was made for something else")
            dtype, sampled = np.dtype(self.meta["type"]), self.meta["sampled"]
            notes = self.meta["notes"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Torn(f"{folder}: {error}") from None
        self._sampled = Records(folder / "sampled.bin", dtype, sampled, readers)
        self._notes = Records(folder / "notes.bin", _NOTE, notes, readers)
        os.utime(folder)

    def close(self) -> None:
        """Others may remove the plan from now on."""
        self._lock.close()

    @property
    def bytes(self) -> int:
        """On disk."""
        return _bytes(self.folder)

    def neighbourhood(self, number: int) -> Neighbourhood:
        """What the model sees of the batch with this number within the plan."""
        return _unpacked(self._sampled.read(number))

    def notes(self, number: int) -> np.ndarray:
        """A number for each node of a batch, int64."""
        return self._notes.read(number)[0]


@dataclass
class Draft:
    """A plan in the making: all batches are sampled."""

    folder: Path
    num_batches: int
    readers: Readers
    sampled: Records
    notes: list[list[int]] = field(default_factory=list)
    """Where the notes are."""

    def nodes(self, number: int) -> np.ndarray:
        """Ids of the nodes of a batch, int64."""
        return self.sampled.read(number)[0]

    def write_notes(self, notes: Iterable[np.ndarray], backwards: bool = False) -> None:
        """Write the note of each batch, int [nodes], in their order or from the last one on."""
        with RecordsWriter(self.folder / "notes.bin", _NOTE, backwards) as writer:
            for note in notes:
                writer.write([note])
        self.notes = writer.index


Finish = Callable[[Draft], Mapping[str, object]]
"""Writes the notes and what else a store keeps; returns further entries of plan.json."""


def opened(
    folder: Path,
    key: Mapping[str, Any],
    batches: Batches,
    draws: range,
    finish: Finish,
    readers: Readers,
    limit: int,
) -> Plan:
    """Open a plan, or make it.

    Args:
        folder: of all plans.
        key: everything that the plan depends on, JSON.
        batches, draws: what is sampled.
        finish: what the store adds.
        readers: threads that read.
        limit: bytes of plans that may be on disk beside a new one.
    Raises:
        ConfigError: the folder cannot be written.
    """
    key = {"format": FORMAT, **key}
    text = json.dumps(key, sort_keys=True)
    mine = folder / hashlib.sha256(text.encode()).hexdigest()[:16]

    def there() -> Plan | None:
        try:
            return Plan(mine, key, readers)
        except Torn:
            return None

    def sound() -> bool:
        found = there()
        if found is not None:
            found.close()
        return found is not None

    while (plan := there()) is None:  # again, where another worker has removed it at once
        with _room(folder), locked(mine):
            if not sound():
                _thin(folder, limit)
                with written_aside(mine, sound) as aside:
                    _make(aside, key, batches, draws, finish, readers)
    return plan


def discard(plan: Plan) -> None:
    """Remove a plan that is torn."""
    plan.close()
    with locked(plan.folder):
        shutil.rmtree(plan.folder, ignore_errors=True)


def _make(
    aside: Path,
    key: Mapping[str, Any],
    batches: Batches,
    draws: range,
    finish: Finish,
    readers: Readers,
) -> None:
    dtype = neighbour_type(len(batches.topology.starts) - 1)
    title = f"sampling batches {draws[0]:,} to {draws[-1]:,}"
    with RecordsWriter(aside / "sampled.bin", dtype) as writer:
        with progress(title, len(draws)) as advance:
            for draw in draws:
                writer.write(_packed(batches.neighbourhood(draw)))
                advance(1)
    sampled = Records(aside / "sampled.bin", dtype, writer.index, readers)
    draft = Draft(aside, len(draws), readers, sampled)
    own = {**finish(draft), "sampled": writer.index, "notes": draft.notes}
    (aside / "lock").touch()
    with (aside / "plan.json").open("w", encoding="utf-8") as file:
        file.write(json.dumps({"key": key, "type": dtype.name, **own}) + "\n")
        to_disk(file)


@contextmanager
def _room(folder: Path) -> Iterator[None]:
    """Say in one line that there is no room."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EIO:  # what was to be read, not written
            raise
        why = f"{error.filename or folder}: {error.strerror or error}"
        hint = f"{why}; make room, or plan fewer batches at once (graph.plan)"
        raise ConfigError("data.root", folder, hint) from None


def _use(folder: Path) -> IO[bytes]:
    """Hold a plan, as others may at the same time."""
    lock = (folder / "lock").open("rb")
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def _thin(folder: Path, limit: int) -> None:
    """Remove plans that nobody uses, those first that were used longest ago, down to a limit."""
    found = []
    for path in folder.glob("[!.]*"):
        try:
            (path / "plan.json").stat()
            found.append((path.stat().st_mtime, _bytes(path), path))
        except FileNotFoundError:  # another worker removes it now
            continue
    left = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if left <= limit:
            return
        if _remove(path):
            left -= size


def _remove(path: Path) -> bool:
    """Remove a plan unless somebody uses it. Returns whether it is gone."""
    try:
        with (path / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        return False
    except FileNotFoundError:  # another worker was first
        pass
    return True


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _packed(whole: Neighbourhood) -> list[np.ndarray]:
    edges = [part for layer in whole.layers for part in (layer.starts, layer.sources)]
    return [whole.nodes, *edges]


def _unpacked(arrays: list[np.ndarray]) -> Neighbourhood:
    nodes, *edges = arrays
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return Neighbourhood(nodes, tuple(Layer(*pair) for pair in pairs))
