"""Run: everything about one training that is decided before its first step, and who takes part."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from co2.comm.mesh import Mesh
from co2.comm.waiting import until_cut
from co2.config import Config, Resume
from co2.errors import PREEMPTED, REFUSED, ConfigError
from co2.methods import Method
from co2.record.console import Console, ProgressConsole
from co2.record.folder import run_folder
from co2.record.lock import NAME, FolderLock
from co2.record.provenance import Origin
from co2.record.record import FolderRecord, Record
from co2.record.trace import Trace
from co2.task import Task
from co2.train import init_from


@dataclass(eq=False)
class Run:
    """One training, on one worker. Used as a context manager it closes what it has opened.

    Nothing of it changes after `open`. Where replicas come and go, `mesh` and `control` are always
    the current ones, and `take_over` makes another worker the one that prints and records.
    """

    config: Config
    folder: Path
    mesh: Mesh
    task: Task
    method: Method
    console: Console
    """Silent on every worker but the first; so is `record`."""
    record: Record
    trace: Trace
    control: dist.ProcessGroup | None
    """A CPU group of all workers for flags, barriers and final figures, which no collective of the
    training can hold up. None for one worker."""
    origin: Origin
    lock: FolderLock | None
    """The first worker's hold on the folder; None on every other worker."""

    @classmethod
    def open(cls, config: Config, task: Task, method: Method, mesh: Mesh, origin: Origin) -> "Run":
        """Make the folder and what writes to it, with a task that is set up and a method that is
        not prepared yet. Collective."""
        control, folder = mesh.control_group(), run_folder(config)
        lock = None if mesh.newcomer else _claim(config, folder, mesh, control)
        path = folder / "trace" / f"rank_{mesh.worker}.json"
        trace = Trace(path if config.trace else None)
        silent = Console(), Record()
        made = cls(config, folder, mesh, task, method, *silent, trace, control, origin, lock)
        mesh.on_change(made._regroup)
        if lock is not None:
            try:
                made._speak()
            except BaseException:
                lock.release()
                raise
        return made

    def _regroup(self, mesh: Mesh) -> None:
        self.mesh, self.control = mesh, mesh.control_group()

    def take_over(self, step: int) -> None:
        """After workers have gone: the first of those who are left speaks and writes for the run
        from this step on."""
        if self.is_first and self.lock is None:
            before, self.lock = self.record, FolderLock.take_over(self.folder)
            self._speak().begin(step, before)

    def _speak(self) -> FolderRecord:
        """Make what prints and writes for the run."""
        config, unit, data = self.config, self.task.unit, self.task.fingerprint()
        title = f"{config.task} · {config.method} · {config.tag}"
        self.console = console = ProgressConsole(title, config.train.steps, unit)
        if self.method.needs:
            console.print_line(f"method={config.method} chooses {' '.join(self.method.needs)}")
        if data.get("num_classes") == 1:
            console.print_line(
                "warning: the data hold one class, so an accuracy of 1.0 means nothing"
            )
        world = config.launch.workers if config.launch.elastic else self.mesh.num_workers
        start = init_from.described(config)
        self.record = record = FolderRecord(config, world, unit, data, self.origin, console, start)
        return record

    @property
    def is_first(self) -> bool:
        """Whether this worker speaks and writes for the run."""
        return self.mesh.worker == 0

    def barrier(self) -> None:
        """Wait for all workers."""
        control = self.control
        if control is not None:
            until_cut(lambda: dist.barrier(group=control))

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # A run that was told to stop, and has saved, is no failure.
        stopped = isinstance(error, SystemExit) and error.code == PREEMPTED
        good = error is None or stopped
        self.trace.close(wait=good)  # after an error it may wait for a worker that is gone
        self.console.close()
        self.record.close(0 if good else 1)
        if self.lock is not None:
            self.lock.release()


def _claim(
    config: Config, folder: Path, mesh: Mesh, control: dist.ProcessGroup | None
) -> FolderLock | None:
    """Hold the folder, on the first worker; with resume=never it is a new one. Collective.

    Raises:
        ConfigError: another run trains there. On the other workers `SystemExit`, so that one line
            tells it.
    """
    lock, refused = None, None
    if mesh.worker == 0:
        try:
            lock = _take(config, folder)
        except ConfigError as error:
            refused = error
    box = [refused is not None]
    if control is not None:
        until_cut(lambda: dist.broadcast_object_list(box, group=control, group_src=0))
    if refused is not None:
        raise refused
    if box[0]:
        raise SystemExit(REFUSED)
    return lock


def _take(config: Config, folder: Path) -> FolderLock:
    lock = FolderLock.take(folder)
    if config.resume is Resume.never and any(path.name != NAME for path in folder.iterdir()):
        # Nothing is lost: `seed0` becomes `seed0.1`, or takes the next free number.
        names = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
        lock.folder = folder.rename(next(name for name in names if not name.exists()))
        lock.release()
        lock = FolderLock.take(folder)
    return lock
