"""The processes of this machine, as Linux tells of them in /proc."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Running:
    """A process that has not ended."""

    pid: int
    parent: int
    session: int
    stopped: bool
    """Whether it stands still until SIGCONT."""

    def command(self) -> bytes:
        """Its program and arguments; empty once it has ended."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return Path(f"/proc/{self.pid}/cmdline").read_bytes()
        return b""


def running() -> Iterator[Running]:
    """All that run."""
    for path in Path("/proc").glob("[0-9]*"):
        if (found := process(int(path.name))) is not None:
            yield found


def process(pid: int) -> Running | None:
    """A process; None if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        # After the name, which may have blanks and brackets in it.
        state, parent, _, session, *_ = stat.rpartition(")")[2].split()
        if state != "Z":  # else it has ended, and its parent has not asked for its status
            return Running(pid, int(parent), int(session), state == "T")
    return None


def is_running(pid: int) -> bool:
    """Whether a process has not ended."""
    return process(pid) is not None
