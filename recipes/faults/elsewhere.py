"""The same trainings, started by torchrun and under torchft."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from co2.record.files import whole_lines
from recipes.faults.trouble import RESTARTS, WORKERS, Trouble
from recipes.runs.processes import process


class Torchrun(Trouble):
    """Workers that torchrun starts, and all of them again when one is lost."""

    launch = ()
    started_by = b"train.py"
    forked = False

    def command(self) -> list[str]:
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}")
        return [sys.executable, *torchrun, f"--max-restarts={RESTARTS}", "train.py", *self.words]

    def kill_all(self) -> None:
        for one in self.workers():  # each is a session of its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        super().kill_all()


class Torchft(Trouble):
    """torchft's DiLoCo with its manager and lighthouse."""

    started_by = b"spawn_main"
    forked = False

    def command(self) -> list[str]:
        module = ("-m", "recipes.faults.torchft_run", str(self.place), str(RESTARTS))
        return [sys.executable, *module, *self.words]

    def step(self) -> int:
        return max(self._steps(), default=0)

    def _steps(self) -> Iterator[int]:
        """How far each replica is that is not lost."""
        for path in self.place.glob("*.jsonl"):
            lines = whole_lines(path)
            step = lines[-1]["step"] if lines else 0
            if step == self.steps or not _is_lost(int(path.stem.partition("-")[2])):
                yield step


def _is_lost(pid: int) -> bool:
    """Whether a process is killed or stands still."""
    found = process(pid)
    return found is None or found.stopped
