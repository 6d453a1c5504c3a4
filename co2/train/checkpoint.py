"""Saving a run and resuming it exactly.

`checkpoints/step_<n>/` holds a file for each worker, because local weights differ, and
`manifest.json` with the files' checksums. Where several workers share a replica, its weights and
inner state lie in a folder `replica_<r>` in the format of torch.distributed.checkpoint, and the
workers' files hold the rest. A checkpoint is written aside, fsynced and renamed, so that its folder
is whole or absent. Damage that the disk does later is found by checksum, and the checkpoint before
it is used. Whatever a checkpoint holds, nothing in it is run, and no file outside it is read.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from co2.comm.mesh import Mesh
from co2.errors import printable
from co2.record.files import CHECKPOINT_FORMAT, write_durably
from co2.train.replica import ReplicaState

MANIFEST = "manifest.json"


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

    def regroup(self, mesh: Mesh, group: dist.ProcessGroup | None) -> None:
        """Go on with other workers."""
        self.mesh, self.group = mesh, group
        self.rank, self.world = mesh.worker, mesh.num_workers

    def save(self, step: int, state: dict[str, Any]) -> bool:
        """Save this worker's state. Collective. Returns False, after a line for a person, where any
        worker could not save."""
        aside, final = self.folder / f".step_{step}", self.folder / f"step_{step}"
        if self.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        self._barrier()
        outcome: list[tuple[dict[str, str], str]] = self._gather(self._write_own(aside, state))
        errors = [error for _, error in outcome if error]
        if self.rank == 0 and not errors:
            try:
                sums = {name: value for sums, _ in outcome for name, value in sums.items()}
                self._publish(step, aside, final, sums)
            except OSError as failed:
                errors = [str(failed)]
        errors = self._from_first(errors)
        if errors and self.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            self.print_line(f"step {step} could not be saved ({errors[0]}); the one before is kept")
        return not errors

    def load(self) -> tuple[int, dict[str, Any]] | None:
        """The newest step whose checkpoint is sound on every worker, and this worker's state; that
        of the first one, for a worker more than those that saved it.

        None where there is no such checkpoint. The state that the workers of a replica share is
        loaded into place.
        """
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

    def _write_own(self, folder: Path, state: dict[str, Any]) -> tuple[dict[str, str], str]:
        """Returns the checksums of the files that this worker writes or checks, and an error
        message, which is empty if all went well. After an error the worker still takes part in what
        its replica writes together."""
        sums: dict[str, str] = {}
        errors: list[Exception] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            name = self._name(self.rank)
            sums[name] = _write(folder / name, state)
        except (
            OSError,
            RuntimeError,
        ) as failed:  # torch's writer reports a full disk as the latter
            errors.append(failed)
        if self.shared is not None:
            try:
                self.shared.write(folder / self._replica)
                written = sorted(path.name for path in (folder / self._replica).iterdir())
                for name in self._mine(f"{self._replica}/{name}" for name in written):
                    sums[name] = _sha256(folder / name)
                _sync_folder(folder / self._replica)
            except OSError as failed:
                errors.append(failed)
        return sums, f"worker {self.rank}: {errors[0]}".splitlines()[0] if errors else ""

    def _set_aside(self, step: int) -> None:
        """Rename a damaged checkpoint, so that it does not count among those that are kept."""
        aside = self.folder / f"damaged_step_{step}"
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(OSError):  # a full or read-only disk: it is found damaged again
            (self.folder / f"step_{step}").rename(aside)

    def _publish(self, step: int, aside: Path, final: Path, sums: dict[str, str]) -> None:
        head = {"format": CHECKPOINT_FORMAT, "step": step, "world": self.world}
        manifest = {**head, "sha256": sums}
        write_durably(aside / MANIFEST, json.dumps(manifest, indent=1))
        _sync_folder(aside)
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        _sync_folder(self.folder)
        for old in self.steps()[self.keep :]:
            shutil.rmtree(self.folder / f"step_{old}", ignore_errors=True)

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

    def _barrier(self) -> None:
        self._gather(None)

    def _gather(self, value: Any) -> list[Any]:
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def _from_first(self, value: Any) -> Any:
        box = [value]
        if self.world > 1:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]


def broadcast_state(state: dict[str, Any] | None, group: dist.ProcessGroup | None) -> Any:
    """Give all workers of a CPU group what its first worker passes. Collective. `Any`: nested dicts
    and lists of tensors and numbers, as in a checkpoint."""
    content = io.BytesIO()
    if state is not None:
        torch.save(state, content)
    length = torch.tensor(content.tell())
    dist.broadcast(length, group_src=0, group=group)
    payload = torch.frombuffer(bytearray(content.getvalue() or int(length)), dtype=torch.uint8)
    dist.broadcast(payload, group_src=0, group=group)
    if state is not None:
        return state
    read = io.BytesIO(payload.numpy().tobytes())
    return torch.load(read, map_location="cpu", weights_only=True)


def random_states() -> dict[str, Any]:
    """The states of every global random generator that a task may draw from."""
    name, keys, *rest = np.random.get_state()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [name, [int(key) for key in keys], *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _write(path: Path, state: dict[str, Any]) -> str:
    with path.open("wb") as file:
        torch.save(state, file)
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
