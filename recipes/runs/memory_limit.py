"""Commands that have less memory than the machine, the page cache of what they read included."""

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from co2.errors import ConfigError, require

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
ENDING_S = 60.0
"""How long the last processes of a command may take to end."""


def run(command: Sequence[str], mib: int | None) -> subprocess.CompletedProcess[str]:
    """Run a command, with all processes that it starts, in so many MiB; None: without a limit.

    Raises:
        ConfigError: this system does not let us set one.
    """
    with _group(mib) as group:

        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        return subprocess.run(command, preexec_fn=enter, capture_output=True, text=True)


def check() -> None:
    """Raise `ConfigError` where no limit can be set."""
    with _group(1024):
        pass


@contextmanager
def _group(mib: int | None) -> Iterator[Path | None]:
    """A control group with this limit."""
    if mib is None:
        yield None
        return
    require(os.geteuid() == 0, "user", os.geteuid(), "a limit of memory needs root; use sudo")
    first = (_V1 / "memory.limit_in_bytes").exists()
    group = (_V1 if first else _V2) / f"co2-{os.getpid()}"
    limit = "memory.limit_in_bytes" if first else "memory.max"
    try:
        group.mkdir()
        try:
            (group / limit).write_text(str(mib << 20))
            yield group
        finally:
            _remove(group)
    except OSError as error:
        hint = f"{error.filename}: this system sets no limit of memory ({error.strerror})"
        raise ConfigError("cgroup", group, hint) from None


def _remove(group: Path) -> None:
    """Processes of the group that are still ending are waited for."""
    until = time.monotonic() + ENDING_S
    while (group / "cgroup.procs").read_text() and time.monotonic() < until:
        time.sleep(0.1)
    group.rmdir()


def forget(folder: Path) -> None:
    """Take the files of a folder out of the page cache, so that whoever reads them pays for it."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
