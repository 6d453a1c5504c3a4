"""Saving a run and resuming it exactly.

`checkpoints/step_<n>/` holds a file for each worker, because local weights differ, and
`manifest.json` with the files' checksums. Where several workers share a replica, its weights and
inner state lie in a folder `replica_<r>` in the format of torch.distributed.checkpoint, and the
workers' files hold the rest. A checkpoint is written aside, fsynced and renamed, so that its folder
is whole or absent. Damage that the disk does later is found by checksum, and the checkpoint before
it is used. Whatever a checkpoint holds, nothing in it is run, and no file outside it is read. That
is why what is no shard is not saved through torch.distributed.checkpoint too: a method's state has
many values that are no tensors, and it would write each as a pickle of its own.

Training stands still only while the state is copied to the host's memory. Threads do the rest:

    each worker    writes its part, fsyncs it, and tells worker 0 by a small file (parts.py)
    worker 0       when all have told: writes the manifest, renames, removes what is too old

No worker waits for another one before `finish`, and no thread uses a group that training uses.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from co2.comm.mesh import Mesh
from co2.comm.waiting import until_cut
from co2.errors import printable
from co2.record.files import CHECKPOINT_FORMAT, write_durably
from co2.train import parts, weights
from co2.train.host_copy import HostCopy
from co2.train.parts import Part
from co2.train.replica import ReplicaState

MANIFEST = "manifest.json"
_POLL_S = 0.02
"""Between two looks whether the other workers have written their parts."""
_SETTLE_S = 10.0


@dataclass(frozen=True)
class _Save:
    """A checkpoint that has been begun."""

    step: int
    aside: Path
    """Where it is written."""
    rank: int
    """Of this worker, when it was begun."""
    world: int
    part: Future[Part]
    """This worker's own."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: `<run>/checkpoints`, on a file system that all workers see.
        mesh: the workers.
        group: a CPU process group of all of them; None for one.
        keep: number of the newest checkpoints that stay.
        print_line: prints a line for a person; worker 0 calls it.
        shared: the state that the workers of a replica save together; None where every worker is
            a replica.
        elastic: whether another number of workers may go on from a checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        group: dist.ProcessGroup | None,
        keep: int,
        print_line: Callable[[str], None],
        shared: ReplicaState | None = None,
        elastic: bool = False,
    ) -> None:
        self.folder, self.rank, self.world = folder, mesh.worker, mesh.num_workers
        self.mesh, self.shared, self.elastic = mesh, shared, elastic
        self.group, self.keep, self.print_line = group, keep, print_line
        self._copy = HostCopy()
        self._writer = ThreadPoolExecutor(1, "checkpoint-part")
        self._publisher = ThreadPoolExecutor(1, "checkpoint")
        self._last: _Save | None = None
        self._publication: Future[None] | None = None
        """On worker 0: of what was begun last. One follows the other."""
        self._untold: dict[Path, Part] = {}
        """Completion notices not yet delivered to worker 0, because the disk was full."""
        self._all_written = threading.Event()
        """Set when no worker writes any more: what is missing then does not come."""
        self._known: dict[int, Part] = {}
        """While `finish` waits: the parts of what was begun last, told by the workers' group."""

    def regroup(self, mesh: Mesh, group: dist.ProcessGroup | None) -> None:
        """Go on with other workers. Collective among them. A checkpoint under way is published if
        those who are lost have written their parts, or else given up."""
        if self._last is not None:
            self._last.part.result()  # the thread reads what changes here
        self.mesh, self.group = mesh, group
        self.rank, self.world = mesh.worker, mesh.num_workers
        self.finish()

    def save(self, step: int, state: dict[str, Any]) -> bool:
        """Save this worker's state, and wait for it. Collective. Returns False, after a line for a
        person, where any worker could not save."""
        self.start(step, state)
        return self.finish() == step

    def start(self, step: int, state: dict[str, Any]) -> None:
        """Begin to save this worker's state, as it is now. Every worker calls it, and none waits
        for another; it waits until this one has written the state before.

        Where a worker cannot save, there is a line for a person and no checkpoint.
        """
        if self._last is not None:
            self._last.part.result()
        shared = {} if self.shared is None else self.shared.state()
        copied, shared = self._copy.take((state, shared))
        aside = self._aside(step)
        part = self._writer.submit(self._write_part, aside, copied, shared)
        self._last = save = _Save(step, aside, self.rank, self.world, part)
        if self.rank == 0:
            self._publication = self._publisher.submit(self._publish_when_written, save)

    def finish(self) -> int | None:
        """Wait for what was begun. Collective. Returns the step that was begun last if there is a
        checkpoint of it; where that failed, a person has been told."""
        last = self._last
        own = None if last is None else (last.aside.name, last.rank, last.part.result())
        known = [entry for entry in self._gather(own) if entry is not None]
        self._untold.clear()
        if last is not None and self._publication is not None:
            self._known = {rank: part for name, rank, part in known if name == last.aside.name}
            self._all_written.set()
            self._publication.result()
            self._all_written.clear()
            self._known, self._publication = {}, None
        if self.rank == 0:
            if last is not None and last.aside.exists():
                self._tell_failure(last.step, "worker 0 is gone")
            self._clear()
        whole = last is not None and self._path(last.step).exists()
        return self._from_first(last.step if last is not None and whole else None)

    def settle(self) -> None:
        """Wait until what was begun is published or given up, if that takes no more than some
        seconds. Not collective: for a worker that is about to end by itself."""
        if self._last is None:
            return
        self._last.part.result()
        deadline = time.monotonic() + _SETTLE_S
        while self._last.aside.exists() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the threads. What `finish` has not waited for, and others have not written, is given
        up."""
        self._all_written.set()
        self._writer.shutdown()
        self._publisher.shutdown()

    def load(self) -> tuple[int, dict[str, Any]] | None:
        """The newest step whose checkpoint is sound on every worker, and this worker's state; that
        of the first one, for a worker more than those that saved it.

        None where there is no such checkpoint. The state that the workers of a replica share is
        loaded into place.
        """
        if self.rank == 0:
            self._clear()
        for step in self._from_first(self.steps()):
            state, own = self._read(step)
            found = [reason for reason in self._gather(own) if reason]
            if not found:
                if self.shared is not None:
                    self.shared.read(self.folder / f"step_{step}" / self._replica)
                return step, state
            if self.rank == 0:
                self.print_line(
                    f"checkpoint step_{step} is damaged ({found[0]}); trying the one before"
                )
                self._set_aside(step)
        return None

    def steps(self) -> list[int]:
        """The steps of all checkpoints, newest first."""
        names = [path.name[5:] for path in self.folder.glob("step_*")]
        return sorted((int(name) for name in names if re.fullmatch("[0-9]+", name)), reverse=True)

    def _write_part(self, aside: Path, state: dict[str, Any], shared: dict[str, Any]) -> Part:
        """In a thread: write this worker's part, and tell worker 0."""
        part = self._write_own(aside, state, shared)
        if self.rank > 0:
            self._untold[aside] = part
        for folder, own in list(self._untold.items()):
            with contextlib.suppress(OSError):  # a full disk: told later, or by `finish`
                own.tell(folder, self.rank)
                del self._untold[folder]
        return part

    def _write_own(self, folder: Path, state: dict[str, Any], shared: dict[str, Any]) -> Part:
        """After an error the worker still takes part in what its replica writes together."""
        sums: dict[str, str] = {}
        errors: list[Exception] = []
        name = self._name(self.rank)
        try:
            self._copy.wait()
            folder.mkdir(parents=True, exist_ok=True)
            sums[name] = _write(folder / name, state)
        except (OSError, RuntimeError) as failed:  # the latter: what it waited for has failed
            errors.append(failed)
            with contextlib.suppress(OSError):  # it may take the room that the error needs
                (folder / name).unlink(missing_ok=True)
        if self.shared is not None:
            try:
                self.shared.write(folder / self._replica, shared)
                written = sorted(path.name for path in (folder / self._replica).iterdir())
                for name in self._mine(f"{self._replica}/{name}" for name in written):
                    sums[name] = _sha256(folder / name)
                _sync_folder(folder / self._replica)
            except OSError as failed:
                errors.append(failed)
        error = f"worker {self.rank}: {errors[0]}".splitlines()[0] if errors else ""
        return Part(sums, error)

    def _publish_when_written(self, save: _Save) -> None:
        """In a thread of worker 0: wait for the parts of all workers, and publish. That its own
        part failed is told at once, because a disk that is full for all keeps the others silent."""
        own = save.part.result().error
        if own:
            self._tell_failure(save.step, own)
        try:
            found = self._parts(save)
            errors = [part.error for _, part in sorted(found.items()) if part.error]
            errors += [f"worker {rank} is gone" for rank in range(save.world) if rank not in found]
            if not errors:
                self._publish(save, found)
        except OSError as failed:
            errors = [str(failed)]
        if errors:
            shutil.rmtree(save.aside, ignore_errors=True)
            if not own:
                self._tell_failure(save.step, errors[0])

    def _parts(self, save: _Save) -> dict[int, Part]:
        """By worker, what all have written; without those who are gone."""
        found, ended = {0: save.part.result()}, False
        while len(found) < save.world and not ended:
            ended = self._all_written.wait(_POLL_S)
            found |= parts.told(save.aside, (r for r in range(save.world) if r not in found))
        return found | self._known if ended and save is self._last else found

    def _tell_failure(self, step: int, reason: str) -> None:
        self.print_line(f"step {step} could not be saved ({reason}); the one before is kept")

    def _set_aside(self, step: int) -> None:
        """Rename a damaged checkpoint, so that it does not count among those that are kept."""
        aside = self.folder / f"damaged_step_{step}"
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(OSError):  # a full or read-only disk: it is found damaged again
            (self.folder / f"step_{step}").rename(aside)

    def _publish(self, save: _Save, written: dict[int, Part]) -> None:
        aside, final = save.aside, self._path(save.step)
        sums = {name: value for part in written.values() for name, value in part.sums.items()}
        head = {"format": CHECKPOINT_FORMAT, "step": save.step, "world": save.world}
        parts.forget(aside, range(save.world))
        write_durably(aside / MANIFEST, json.dumps({**head, "sha256": sums}, indent=1))
        _sync_folder(aside)
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        _sync_folder(self.folder)
        for old in self.steps()[self.keep :]:
            shutil.rmtree(self._path(old), ignore_errors=True)

    def _clear(self) -> None:
        """Remove what was never published; nobody writes now."""
        for aside in self.folder.glob(".step_*"):
            shutil.rmtree(aside, ignore_errors=True)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def _aside(self, step: int) -> Path:
        """Where a checkpoint is written. One who is lost may write on, so that members of another
        generation have another place."""
        elastic = self.mesh.elastic
        generation = "" if elastic is None else f".{elastic.generation}"
        return self.folder / f".step_{step}{generation}"

    def _damage(self, step: int) -> str:
        """Why this worker's part of a checkpoint cannot be used; empty if it can."""
        folder, name = self.folder / f"step_{step}", self._name(self.rank)
        try:
            manifest = json.loads(self._inside(folder / MANIFEST).read_text())
            if manifest["world"] != self.world and not self.elastic:
                return f"saved by {manifest['world']} workers"
            name = self._own(manifest["world"])
            if manifest["step"] != step:
                return f"it is of step {manifest['step']}"
            sums = manifest["sha256"]
            files = {own: self._inside(folder / own) for own in (name, *sums)}
            for own in (name, *self._mine(sums)):
                if _sha256(files[own]) != sums[own]:
                    return f"{own}: checksum differs"
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as failed:
            return f"{MANIFEST} or {name}: {failed}"
        return ""

    def _read(self, step: int) -> tuple[dict[str, Any], str]:
        """This worker's state of a checkpoint, and why it cannot be used; empty if it can."""
        folder, reason = self.folder / f"step_{step}", self._damage(step)
        if reason:
            return {}, printable(reason)
        name = self._own(json.loads((folder / MANIFEST).read_text())["world"])
        try:
            if self.shared is not None:
                self.shared.check(self._inside(folder / self._replica / ".metadata").parent)
            with warnings.catch_warnings():  # torch's, before it refuses a pickle
                warnings.simplefilter("ignore")
                state = torch.load(folder / name, map_location="cpu", weights_only=True)
        except Exception as failed:  # torch and pickle raise many kinds
            return {}, f"it cannot be read ({type(failed).__name__})"
        return (state, "") if isinstance(state, dict) else ({}, f"{name} holds no state")

    def _inside(self, path: Path) -> Path:
        """The same path. Raises `ValueError` if it is no file, or leads out of the checkpoints."""
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise ValueError(f"{path.name} lies elsewhere")
        if path.exists() and not path.is_file():
            raise ValueError(f"{path.name} is no file")
        return path

    def _own(self, world: int) -> str:
        """The file that this worker reads, of those that so many workers have written."""
        return self._name(self.rank if self.rank < world else 0)

    @property
    def _replica(self) -> str:
        return f"replica_{self.mesh.replica}"

    def _mine(self, names: Iterable[str]) -> list[str]:
        """Those of the files that the replica has written together which this worker checks."""
        shared = sorted(name for name in names if name.startswith(f"{self._replica}/"))
        return shared[self.mesh.rank_in_replica :: self.mesh.replica_size]

    @staticmethod
    def _name(rank: int) -> str:
        return f"rank_{rank}.pt"

    def _gather(self, value: Any) -> list[Any]:
        values = [value] * self.world
        if self.world > 1:
            until_cut(lambda: dist.all_gather_object(values, value, group=self.group))
        return values

    def _from_first(self, value: Any) -> Any:
        box = [value]
        if self.world > 1:
            until_cut(lambda: dist.broadcast_object_list(box, src=0, group=self.group))
        return box[0]


def _write(path: Path, state: dict[str, Any]) -> str:
    with path.open("wb") as file:
        weights.write(file, state)
        file.flush()
        os.fsync(file.fileno())
    return _sha256(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
