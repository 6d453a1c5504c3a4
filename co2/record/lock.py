"""One run at a time in a folder: the file `.lock`, which names the process and host of its run.

Who writes for the run, worker 0, holds a lock of the kernel's on this file. It ends with the
process, however that ends, so a run that was killed holds nothing. Not every network file system
carries such a lock to other machines, and not every one that does gives it back when a machine is
lost. So the holder also touches the file every few seconds. Who finds the name of another host
watches the file: the run there is alive if it is touched, and was lost otherwise.
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
from dataclasses import asdict, dataclass
from pathlib import Path

from co2.errors import ConfigError, printable

NAME = ".lock"
_BEAT_S = 5.0
_SILENT_S = 30.0
"""A run on another host that has not touched its lock for so long was lost."""
_LOOK_S = 0.1
_TAKEN = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""What file systems without locks say."""


@dataclass(frozen=True)
class Holder:
    """Who trains in a folder."""

    process: int
    host: str

    @classmethod
    def of_this_process(cls) -> "Holder":
        """A local worker names the process that a person has started."""
        starter = multiprocessing.parent_process()
        pid = os.getpid() if starter is None or starter.pid is None else starter.pid
        return cls(pid, socket.gethostname())

    def __str__(self) -> str:
        return f"{self.process} on {self.host}"


class FolderLock:
    """A run's folder, held by this process until `release`. Made by `take`."""

    def __init__(self, folder: Path, file: int) -> None:
        self.folder, self._file = folder, file
        """`folder` is to be set when it is renamed."""
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
        """Hold the folder in the place of a worker that the run has given up, which may live."""
        (folder / NAME).unlink(missing_ok=True)
        return cls.take(folder)

    def release(self) -> None:
        """Let others have the folder. Nothing is removed that another run has made."""
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
            if not _is_at(path, file):  # it was removed, or another has taken it over
                os.close(file)
                continue
            if alive:
                raise _held(path, holder)
            if locked is False:  # by a machine that was lost, or cannot be reached
                path.unlink(missing_ok=True)
                os.close(file)
                continue
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(asdict(Holder.of_this_process())).encode(), 0)
            return file
        except BaseException:
            os.close(file)
            raise


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


def _is_alive(path: Path, locked: bool | None, holder: Holder | None) -> bool:
    """Whether the run that has locked a file, or has left its name there, goes on."""
    if holder is None:  # it has not written its name yet
        return locked is False
    if holder.host == socket.gethostname() and locked is not None:
        return not locked
    return _is_touched(path, holder)


def _is_touched(path: Path, holder: Holder) -> bool:
    """Watch the file. Not by opening it: to close it once more would give up the lock."""
    before = _stamp(path)
    where = os.path.relpath(path.parent)
    print(printable(f"{where} was held by {holder}: looking if it still is"), flush=True)
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


def _holder(file: int) -> Holder | None:
    """Who is named in a file; None where nobody is."""
    try:
        known = json.loads(os.pread(file, 4096, 0))
        process, host = known["process"], known["host"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    good = isinstance(process, int) and isinstance(host, str)
    return Holder(process, host) if good else None


def _held(path: Path, holder: Holder | None) -> ConfigError:
    folder = path.parent
    by = "another run" if holder is None else holder
    hint = f"{os.path.relpath(folder)} is held by {by}; let that run end, or give this one a "
    return ConfigError("tag", folder.parent.name, f"{hint}tag=NAME of its own")
