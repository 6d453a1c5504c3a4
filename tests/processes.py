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

    def command(self) -> bytes:
        """Its program and arguments; empty once it has ended."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return Path(f"/proc/{self.pid}/cmdline").read_bytes()
        return b""


def running() -> Iterator[Running]:
    """All that run."""
    for path in Path("/proc").glob("[0-9]*"):
        if (found := _running(path)) is not None:
            yield found


def is_running(pid: int) -> bool:
    """Whether a process has not ended."""
    return _running(Path(f"/proc/{pid}")) is not None


def _running(path: Path) -> Running | None:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # After the name, which may have blanks and brackets in it.
        state, *fields = (path / "stat").read_text().rpartition(")")[2].split()
        if state != "Z":  # else it has ended, and its parent has not asked for its status
            return Running(int(path.name), int(fields[0]), int(fields[2]))
    return None
