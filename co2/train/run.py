"""Run: everything about one training that is decided before its first step, and who takes part."""

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from co2.comm.mesh import Mesh
from co2.comm.sockets import until_cut
from co2.config import Config, Resume
from co2.errors import PREEMPTED
from co2.methods import Method
from co2.record.console import Console, ProgressConsole
from co2.record.folder import run_folder
from co2.record.provenance import Origin
from co2.record.record import FolderRecord, Record
from co2.record.trace import ProfilerTrace, Trace
from co2.task import Task
from co2.train import initial


@dataclass(eq=False)
class Run:
    """One training, on one worker. Used as a context manager it closes what it has opened.

    Nothing of it changes after `open`, unless replicas come and go (`regroup`).
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

    @classmethod
    def open(cls, config: Config, task: Task, method: Method, mesh: Mesh, origin: Origin) -> "Run":
        """Make the folder and what writes to it. Collective: every worker calls it.

        Args:
            config: of the run, checked.
            task: set up.
            method: how the replicas are kept in step, not prepared yet.
            mesh: of the workers.
            origin: how the run was started.
        """
        first, control = mesh.worker == 0, mesh.new_group_of_workers("gloo")
        folder = run_folder(config)
        if first and config.resume is Resume.never and folder.exists():
            _move_aside(folder)
        if control is not None and not mesh.newcomer:
            until_cut(lambda: dist.barrier(group=control))
        trace = Trace()
        if config.trace:
            trace = ProfilerTrace(folder / "trace" / f"rank_{mesh.worker}.json")
        silent = Console(), Record()
        made = cls(config, folder, mesh, task, method, *silent, trace, control, origin)
        if first:
            made._speak()
        return made

    def regroup(self, mesh: Mesh, step: int) -> None:
        """Go on with other workers, after this step. Collective. The first of them speaks and
        writes for the run from now on."""
        spoke = self.is_first
        self.mesh, self.control = mesh, mesh.new_group_of_workers("gloo")
        if self.is_first and not spoke:
            before = self.record
            self._speak().begin(step, before)

    def _speak(self) -> FolderRecord:
        """Make what prints and writes for the run."""
        config, task = self.config, self.task
        data = task.fingerprint()
        title = f"{config.task} · {config.method} · {config.tag}"
        self.console = ProgressConsole(title, config.train.steps, task.unit)
        if data.get("num_classes") == 1:
            text = "warning: the data hold one class, so an accuracy of 1.0 means nothing"
            self.console.print_line(text)
        self.record = record = FolderRecord(
            config,
            config.launch.workers if config.launch.elastic else self.mesh.num_workers,
            task.unit,
            data,
            self.origin,
            self.console,
            initial.described(config),
        )
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A run that was told to stop, and has saved, is no failure.
        stopped = isinstance(error, SystemExit) and error.code == PREEMPTED
        self.trace.close()
        self.console.close()
        self.record.close(0 if error is None or stopped else 1)


def _move_aside(folder: Path) -> None:
    """Nothing is lost: `seed0` becomes `seed0.1`, or takes the next free number."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(target)
