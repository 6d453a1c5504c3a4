"""Saving a run and resuming it exactly.

`checkpoints/step_<n>/` holds a file for each worker, because local weights differ, and
`manifest.json` with the files' checksums. `replica_<r>/worker_<k>.safetensors` is that of the k-th
worker of a replica (state_file.py). What is equal on all replicas, such as the anchor of CO2, is
there once: `equal/replica_<r>_worker_<k>.safetensors` has the part of it that this worker writes.
Each folder is a checkpoint that PyTorch's own tools load, that of a replica with its weights, or
`equal` where all replicas have the same:

    state = {"model": model.state_dict()}
    reader = torch.distributed.checkpoint.HuggingFaceStorageReader("…/step_100/replica_0")
    torch.distributed.checkpoint.load(state, storage_reader=reader)

A checkpoint is written aside, fsynced and renamed, so that its folder is whole or absent. Damage
that the disk does later is found by checksum, and the checkpoint before it is used. Whatever a
checkpoint holds, nothing in it is run, and no file outside it is read.

Training stands still only while the state is copied to the host's memory. Threads do the rest:

    each worker    writes its files, fsyncs them, and tells worker 0 by a small file
    worker 0       when all have told: writes the manifest, renames, removes what is too old

No worker waits for another one before `finish`, and no thread uses a group that training uses. The
writers of torch.distributed.checkpoint would: they plan together what each of them writes. Theirs
also describe what is no tensor by pickles.
"""

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from co2.atomic import put_in_place, sync_folder, write_durably
from co2.comm.collectives import gathered
from co2.comm.mesh import Mesh
from co2.errors import ConfigError, printable
from co2.record.files import CHECKPOINT_FORMAT, DAMAGE, saved_steps, unreadable
from co2.train import state_file
from co2.train.layout import Layout
from co2.train.state_file import HostCopy, Split

T = TypeVar("T")
MANIFEST = "manifest.json"
_EQUAL = "equal/"
_POLL_S, _LONGEST_POLL_S = 0.02, 1.0
"""Between two looks whether the other workers have written their parts: twice as long after each
that has found nothing new, up to the latter."""
_SETTLE_S = 10.0


@dataclass(frozen=True)
class Written:
    """How one worker's part of a checkpoint has ended."""

    sha256: dict[str, str]
    """Of its files, by their names in the checkpoint."""
    error: str
    """Why it was not written, in one line; empty if it is whole."""
    diverged: bool = False
    """Whether that is because something in it is not finite."""

    def notify(self, folder: Path, rank: int) -> None:
        """Leave this in the folder of a checkpoint, for worker 0. Raises `OSError`."""
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(_notice(folder, rank), json.dumps(asdict(self)))


@dataclass(frozen=True)
class _Save:
    """A checkpoint that has been begun."""

    step: int
    aside: Path
    """Where it is written."""
    rank: int
    """Of this worker, when it was begun."""
    world: int
    part: Future[Written]
    """This worker's own."""


class _Unusable(Exception):
    """In words, what is wrong with a checkpoint."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: `<run>/checkpoints`, on a file system that all workers see.
        mesh: the workers.
        group: a CPU process group of all of them; None for one.
        keep: number of the newest checkpoints that stay.
        print_line: prints a line for a person; worker 0 calls it.
    """

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        group: dist.ProcessGroup | None,
        keep: int,
        print_line: Callable[[str], None],
    ) -> None:
        self.folder, self.rank, self.world = folder, mesh.worker, mesh.num_workers
        self.mesh, self.group, self.keep, self.print_line = mesh, group, keep, print_line
        self._copy = HostCopy()
        self._writer = ThreadPoolExecutor(1, "checkpoint-part")
        self._publisher = ThreadPoolExecutor(1, "checkpoint")
        self.diverged = ""
        """What was not finite, and was not saved, in words; empty if nothing was."""
        self._last: _Save | None = None
        self._publication: Future[None] | None = None
        """On worker 0: of what was begun last. One follows the other."""
        self._undelivered: dict[Path, Written] = {}
        """Completion notices not yet delivered to worker 0, because the disk was full."""
        self._all_written = threading.Event()
        """Set once no worker writes any more: missing parts will not come."""
        self._at = folder
        """What is being read."""
        self._known: dict[int, Written] = {}
        """While `finish` waits: the parts of the newest checkpoint, gathered by rank."""

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
        mesh = self.mesh
        own = state_file.split(state, mesh.rank_in_replica, mesh.replica, mesh.num_replicas)
        copied, aside = self._copy.take(own.tensors), self._aside(step)
        part = self._writer.submit(self._write_part, step, aside, own, copied)
        self._last = save = _Save(step, aside, self.rank, self.world, part)
        if self.rank == 0:
            self._publication = self._publisher.submit(self._publish_when_written, save)

    def hold(self) -> None:
        """Call it before anything changes what was given to `start`. The host goes on; a GPU does
        so once the state is copied."""
        self._copy.hold()

    def finish(self) -> int | None:
        """Wait for what was begun. Collective. Returns the step that was begun last if there is a
        checkpoint of it; where that failed, a person has been told."""
        last = self._last
        own = None if last is None else (last.aside.name, last.rank, last.part.result())
        known = [entry for entry in gathered(own, self.group) if entry is not None]
        self._undelivered.clear()
        for name, _, part in known:  # all workers end alike
            if last is not None and name == last.aside.name and part.diverged:
                self.diverged = f"{part.error} at step {last.step}"
        if last is not None and self._publication is not None:
            self._known = {rank: part for name, rank, part in known if name == last.aside.name}
            self._all_written.set()
            self._publication.result()
            self._all_written.clear()
            self._known, self._publication = {}, None
        if self.rank == 0:
            if last is not None and last.aside.exists():
                self._report_failure(last.step, "worker 0 is gone")
            self._clear()
        whole = last is not None and self._path(last.step).exists()
        return gathered(last.step if last is not None and whole else None, self.group)[0]

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
        """End the threads. A checkpoint that is not complete on all workers is given up."""
        self._all_written.set()
        self._writer.shutdown()
        self._publisher.shutdown()

    def load(self, layout: Layout | None = None) -> tuple[int, dict[str, Any]] | None:
        """Return the newest step whose checkpoint is sound and finite on every worker, and this
        worker's state. A worker without a file gets replica 0's.

        None where there is no checkpoint at all.

        Args:
            layout: the rows that this worker holds; needed where replicas had another size.
        Raises:
            ConfigError: on all workers, if one cannot read a checkpoint, which may be sound, or if
                no checkpoint is sound. All stay as they are.
        """
        if self.rank == 0:
            self._clear()
        unusable: dict[int, str] = {}
        there, refused = gathered(self._listed(), self.group)[0]
        if refused is not None:
            raise refused
        for step in there:
            found, fault = self._together(partial(self._checked, step))
            if found is not None and not fault:
                state, fault = self._together(partial(self._read, layout, *found))
                if state is not None and not fault:
                    if self.rank == 0:
                        for bad in unusable:
                            self._set_aside(bad)
                    return step, state
            unusable[step] = f"step_{step} {fault}"
            if self.rank == 0:
                self.print_line(f"checkpoint {unusable[step]}; trying the one before")
        if unusable:
            last = unusable[min(unusable)]
            hint = (
                f"{os.path.relpath(self.folder)} holds no checkpoint that can be used ({last}); "
                "put a sound one there, or train afresh with resume=never"
            )
            raise ConfigError("resume", "auto", hint)
        return None

    def steps(self) -> list[int]:
        """The steps of all checkpoints, newest first."""
        return saved_steps(self.folder)

    def _listed(self) -> tuple[list[int], ConfigError | None]:
        """On worker 0, `steps`, or the refusal where they cannot be listed: it asks for all."""
        try:
            return self.steps() if self.rank == 0 else [], None
        except ConfigError as error:
            return [], error

    def _write_part(
        self, step: int, aside: Path, own: Split, copied: Mapping[str, Tensor]
    ) -> Written:
        """In a thread: write this worker's part, and tell worker 0."""
        part = self._write_own(aside, own, copied)
        if part.diverged:
            self.diverged = f"{part.error} at step {step}"
        if self.rank > 0:
            self._undelivered[aside] = part
        for folder, written in list(self._undelivered.items()):
            try:
                written.notify(folder, self.rank)
            except FileNotFoundError:  # worker 0 has read it, and removed the folder meanwhile
                pass
            except OSError:  # a full disk: told later, or by `finish`
                continue
            del self._undelivered[folder]
        return part

    def _write_own(self, aside: Path, own: Split, copied: Mapping[str, Tensor]) -> Written:
        writers = {_own(self.rank, self.mesh.replica_size): state_file.write}
        if own.equal:
            writers[_equal(self.rank, self.mesh.replica_size)] = state_file.write_equal
        sha256 = {}
        try:
            for name in writers:  # first: `settle` waits until it is gone
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
            self._copy.wait()
            if bad := state_file.not_finite(state_file.rebuilt(own.values, copied.get)):
                return Written({}, f"worker {self.rank}: {bad} is not finite", diverged=True)
            for name, write in writers.items():
                write(aside / name, own, copied)
                sha256[name] = _sha256(aside / name)
                sync_folder((aside / name).parent)
            return Written(sha256, "")
        except (OSError, RuntimeError) as failed:  # the latter: what it waited for has failed
            for name in writers:
                with contextlib.suppress(OSError):  # it may take the room that the error needs
                    (aside / name).unlink(missing_ok=True)
            return Written({}, f"worker {self.rank}: {failed}".splitlines()[0])

    def _publish_when_written(self, save: _Save) -> None:
        """In a thread of worker 0: wait for the parts of all workers, and publish. That its own
        part failed is told at once, because a disk that is full for all keeps the others silent."""
        own = save.part.result().error
        if own:
            self._report_failure(save.step, own)
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
                self._report_failure(save.step, errors[0])

    def _parts(self, save: _Save) -> dict[int, Written]:
        """By worker, what all have written; without those who are gone."""
        found, ended, pause_s = {0: save.part.result()}, False, _POLL_S
        while len(found) < save.world and not ended:
            ended = self._all_written.wait(pause_s)
            new = _delivered(save.aside, range(save.world) - found.keys())
            pause_s = _POLL_S if new else min(2 * pause_s, _LONGEST_POLL_S)
            found |= new
        return found | self._known if ended and save is self._last else found

    def _report_failure(self, step: int, reason: str) -> None:
        self.print_line(f"step {step} could not be saved ({reason}); the one before is kept")

    def _set_aside(self, step: int) -> None:
        """Rename a checkpoint that cannot be used, so that it does not count among those that are
        kept."""
        aside = self.folder / f"damaged_step_{step}"
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(OSError):  # a full or read-only disk: it is found damaged again
            (self.folder / f"step_{step}").rename(aside)

    def _publish(self, save: _Save, written: dict[int, Written]) -> None:
        aside, final = save.aside, self._path(save.step)
        sums = {name: s for _, part in sorted(written.items()) for name, s in part.sha256.items()}
        head = {"format": CHECKPOINT_FORMAT, "step": save.step, "world": save.world}
        for rank in written:
            _notice(aside, rank).unlink(missing_ok=True)
        write_durably(aside / MANIFEST, json.dumps({**head, "sha256": sums}, indent=1))
        if final.exists():
            shutil.rmtree(final)
        put_in_place(aside, final)
        for old in self.steps()[self.keep :]:
            shutil.rmtree(self._path(old), ignore_errors=True)

    def _clear(self) -> None:
        """Remove what was never published; nobody writes now."""
        for aside in self.folder.glob(".step_*"):
            shutil.rmtree(aside, ignore_errors=True)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def _aside(self, step: int) -> Path:
        """Where a checkpoint is written: a folder for each generation of members, because a lost
        worker may write on."""
        elastic = self.mesh.elastic
        generation = "" if elastic is None else f".{elastic.generation}"
        return self.folder / f".step_{step}{generation}"

    def _together(self, look: Callable[[], T]) -> tuple[T | None, str]:
        """What this worker finds in a checkpoint, and in words what is wrong with it for any of
        them. Collective. Raises `ConfigError` on all, if one cannot look."""
        from safetensors import SafetensorError  # not needed by the library

        found, fault, refusal = None, "", None
        try:
            found = look()
        except _Unusable as error:
            fault = printable(str(error))
        except ConfigError as error:
            refusal = error
        except (*DAMAGE, SafetensorError) as failed:
            name = self._at.relative_to(self.folder).as_posix().partition("/")[2]
            text = f"{name} cannot be read ({type(failed).__name__}: {failed})"
            fault = printable(f"is damaged ({text})")
        except Exception as failed:  # the system's, such as too little memory
            refusal = self._unreadable(self._at, failed)
        faults, refusals = zip(*gathered((fault, refusal), self.group), strict=True)
        if any(refusals):
            raise next(filter(None, refusals))
        return found, next(filter(None, faults), "")

    def _checked(self, step: int) -> tuple[dict[str, Path], int]:
        """The files of a checkpoint by their names, and how many workers had a replica. Each worker
        takes the checksums of some, so that whatever any of them reads is sound. Raises errors of
        many kinds."""
        folder = self._path(step)
        try:
            folder.lstat()
        except OSError as failed:
            raise self._unreadable(folder, failed) from None
        self._at = folder / MANIFEST
        manifest = json.loads(self._inside(self._at).read_text())
        world, sums = manifest["world"], dict(manifest["sha256"])
        if manifest["step"] != step:
            raise _Unusable(f"is damaged (it is of step {manifest['step']})")
        files = {name: self._inside(folder / name) for name in sums}
        size = max(1, sum(name.startswith("replica_0/") for name in files))
        there = sum(not name.startswith(_EQUAL) for name in files)
        if world != there or world % size:
            text = f"is damaged (saved by {world} workers, of whom {there} have a file)"
            raise _Unusable(text)
        if missing := [name for rank in range(world) if (name := _own(rank, size)) not in files]:
            raise _Unusable(f"is damaged ({missing[0]}: no checksum)")
        for rank in range(self.rank, world, self.world):  # itself, if as many as now have saved
            for name in (_own(rank, size), _equal(rank, size)):
                self._at = folder / name
                if name in files and _sha256(files[name]) != sums[name]:
                    raise _Unusable(f"is damaged ({name}: checksum differs)")
        return files, size

    def _read(self, layout: Layout | None, files: Mapping[str, Path], size: int) -> dict[str, Any]:
        """This worker's state. Where its replica is new, or others are lost, the replica begins
        from the mean of what all have had for themselves; what has none is replica 0's, or as it
        was.

        Args:
            layout: see `load`.
            files: by their names.
            size: how many workers had a replica.
        Raises:
            errors of many kinds.
        """
        place = self.mesh.rank_in_replica if self.mesh.rank_in_replica < size else 0
        own, equal = (
            [files.get(name(rank, size)) for rank in range(len(files))] for name in (_own, _equal)
        )
        held = [[*filter(None, own[k::size])] for k in range(size)]
        saved_by = len(held[place])
        replica = self.mesh.replica if self.mesh.replica < saved_by else 0
        mean = self.mesh.replica >= saved_by or self.mesh.num_replicas < saved_by
        averaged = {all_of[replica]: all_of for all_of in held if mean}
        parts = [[held[k][replica], *filter(None, equal[k::size])] for k in range(size)]
        self._at = parts[place][0]
        if size == self.mesh.replica_size or layout is None:
            state = state_file.read(parts.pop(place), parts, averaged)
        else:
            state = state_file.read_anew(parts, place, layout, averaged)
            if state is None:
                hint = (
                    f"{os.path.relpath(self._at)} is of an older version of the suite, which does "
                    f"not tell what each worker of a replica held; use {size}"
                )
                raise ConfigError("mesh.replica_size", self.mesh.replica_size, hint)
        if not isinstance(state, dict):
            raise _Unusable(f"is damaged ({_own(replica * size + place, size)} holds no state)")
        if name := state_file.not_finite(state):
            raise _Unusable(f"is of a training that diverged ({name} is not finite)")
        return state

    def _unreadable(self, path: Path, failed: Exception) -> ConfigError:
        return unreadable(path, failed, f" on worker {self.rank}")

    def _inside(self, path: Path) -> Path:
        """The same path. Raises `ValueError` if it is no file, or leads out of the checkpoints."""
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise ValueError(f"{path.name} lies elsewhere")
        if path.exists() and not path.is_file():
            raise ValueError(f"{path.name} is no file")
        return path


def _own(rank: int, replica_size: int) -> str:
    """The file of what a worker has for itself, or shares with those of its replica."""
    replica, worker = divmod(rank, replica_size)
    return f"replica_{replica}/worker_{worker}.safetensors"


def _equal(rank: int, replica_size: int) -> str:
    """The file of the part that a worker writes of what is equal on all replicas."""
    replica, worker = divmod(rank, replica_size)
    return f"{_EQUAL}replica_{replica}_worker_{worker}.safetensors"


def _notice(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.json"


def _delivered(folder: Path, ranks: Iterable[int]) -> dict[int, Written]:
    """What those of the workers have told that are done. One look at the folder finds them: to ask
    for the file of each would be hundreds of questions to a file system that all share."""
    there = set(os.listdir(folder)) if folder.exists() else set()
    done = (rank for rank in ranks if _notice(folder, rank).name in there)
    return {rank: Written(**json.loads(_notice(folder, rank).read_text())) for rank in done}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
