"""One run at a time in a folder: the file `.lock`, which names the process and host of its run.

Worker 0, which writes for the run, holds a lock of the kernel's on this file. It ends with the
process, so a killed run holds nothing. Some network file systems do not show such a lock to other
machines, and some keep that of a machine that is lost. So the holder also touches the file every
few seconds. A process that finds another host's name watches the file: if nobody touches it, that
run was lost.
"""

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import socket
import threading
import time
from pathlib import Path

from co2.errors import ConfigError, printable
from co2.record.files import DAMAGE

NAME = ".lock"
_BEAT_S = 5.0
_SILENT_S = 30.0
"""A run on another host that has not touched its lock for so long was lost."""
_LOOK_S = 0.1
_TAKEN = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""What file systems without locks say."""
Holder = tuple[int, str]
"""Process and host of a run."""


class FolderLock:
    """A run's folder, held by this process until `release`. Made by `take`."""

    def __init__(self, folder: Path, file: int) -> None:
        self.folder, self._file = folder, file
        """Set `folder` when it is renamed."""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    @classmethod
    def take(cls, folder: Path) -> "FolderLock":
        """Hold the folder, which is made where there is none.

        Raises:
            ConfigError: another run trains there, or the lock cannot be written.
        """
        path = folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return cls(folder, _taken(path))
        except OSError as error:
            hint = f"{os.path.relpath(path)} cannot be written ({error.strerror}); make room, or "
            hint += "give another place with runs=FOLDER"
            raise ConfigError("tag", folder.parent.name, hint) from None

    @classmethod
    def take_over(cls, folder: Path) -> "FolderLock":
        """Hold the folder in place of a worker that counts as lost, but may live."""
        (folder / NAME).unlink(missing_ok=True)
        return cls.take(folder)

    def release(self) -> None:
        """Let others have the folder. The lock of another run is not removed."""
        self._done.set()
        self._thread.join()
        path = self.folder / NAME
        if _is_at(path, self._file):
            path.unlink()
        os.close(self._file)

    def _beat(self) -> None:
        while not self._done.wait(_BEAT_S):
            with contextlib.suppress(OSError):  # a network drive may be away; the next beat counts
                os.utime(self._file)


def _taken(path: Path) -> int:
    """The descriptor of the file, locked and with this process's name. Raises `ConfigError`."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            locked, holder = _locked(file), _holder(file)
            alive = _is_alive(path, locked, holder)
            if _is_at(path, file):  # else it was removed, or another has taken it over
                if alive:
                    raise _held(path, holder)
                if locked is not False:
                    # A local worker names the process that a person has started.
                    named = multiprocessing.parent_process() or multiprocessing.current_process()
                    own = {"process": named.pid, "host": socket.gethostname()}
                    os.ftruncate(file, 0)
                    os.pwrite(file, json.dumps(own).encode(), 0)
                    return file
                path.unlink(missing_ok=True)  # its machine was lost, or cannot be reached
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _locked(file: int) -> bool | None:
    """Lock a file. False if another process has locked it, None where nobody can."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        if error.errno not in _TAKEN:
            raise
        return False
    return True


def _holder(file: int) -> Holder | None:
    """The process and host in a file; None where it holds none."""
    try:
        known = json.loads(os.pread(file, 4096, 0))
        process, host = known["process"], known["host"]
    except (*DAMAGE, OSError):
        return None
    return (process, host) if isinstance(process, int) and isinstance(host, str) else None


def _is_alive(path: Path, locked: bool | None, holder: Holder | None) -> bool:
    """Whether the run that has locked a file, or has left its name there, goes on."""
    if holder is None or (holder[1] == socket.gethostname() and locked is not None):
        return locked is False
    # Watch it. Not by opening it: to close it once more would give up the lock.
    before, where = _stamp(path), os.path.relpath(path.parent)
    text = f"{where} was held by {holder[0]} on {holder[1]}: looking if it still is"
    print(printable(text), flush=True)
    deadline = time.monotonic() + _SILENT_S
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        if _stamp(path) != before:
            return True
    return False


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _is_at(path: Path, file: int) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _held(path: Path, holder: Holder | None) -> ConfigError:
    folder, by = path.parent, "another run" if holder is None else f"{holder[0]} on {holder[1]}"
    hint = f"{os.path.relpath(folder)} is held by {by}; let that run end, or give this one a "
    return ConfigError("tag", folder.parent.name, f"{hint}tag=NAME of its own")
