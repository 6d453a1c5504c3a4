"""Files and folders that appear whole or not at all, also after a crash of the machine."""

import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO

from co2.errors import ConfigError


@contextmanager
def durable(path: Path) -> Iterator[IO[bytes]]:
    """A file to write in, aside; at the end it becomes `path`. Raises `OSError`, which names the
    file and leaves nothing aside."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            yield file
            to_disk(file)
        put_in_place(aside, path)
    except BaseException as error:
        with suppress(OSError):  # of a file system that is only read
            aside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def write_durably(path: Path, text: str) -> None:
    """Write a small file as `durable` does."""
    with durable(path) as file:
        file.write(text.encode())


@contextmanager
def written_aside(folder: Path, sound: Callable[[], bool]) -> Iterator[Path]:
    """Yield an empty folder, which becomes `folder` when the block ends without an exception, and
    vanishes otherwise. Raises `OSError` where it cannot be written.

    Of several writers on one machine only one is here at a time (`locked`). If another machine was
    first, its folder is kept.

    Args:
        folder: what is there is replaced unless it is sound.
        sound: whether what is at `folder` can be used.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    mine = f".{folder.name}.{socket.gethostname()}"
    for stale in folder.parent.glob(f"{mine}.*"):  # left by a process that was killed
        _remove(stale)
    aside = folder.parent / f"{mine}.{os.getpid()}"
    aside.mkdir()
    try:
        yield aside
        _move(aside, folder, sound)
    finally:
        if aside.exists():
            _remove(aside)


def require_writable(key: str, root: object, place: Path) -> None:
    """Raise `ConfigError` where nothing can be made, before long work whose result is to lie there.

    Args:
        key, root: key of the configuration that chose the place, and its value, for errors.
        place: a file or folder below `root`, which need not exist.
    """
    there = place.absolute().parent
    try:
        there = next(path for path in (there, *there.parents) if path.exists())
        # By a trial: os.access finds /proc writable.
        with tempfile.TemporaryDirectory(prefix=".writable", dir=there):
            pass
    except OSError as error:
        hint = f"cannot write {there} ({error.strerror}); choose another"
        raise ConfigError(key, root, hint) from None


def locked(folder: Path) -> AbstractContextManager[object]:
    """A lock with which only one process of this machine at a time makes `folder`.

    It saves work only: the rename makes two writers safe, even on two machines. Its file is in the
    system's temporary folder, where file locks work, and where a refused run leaves nothing behind.
    """
    from filelock import FileLock

    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    return FileLock(Path(tempfile.gettempdir()) / f"tokens-{os.getuid()}-{name}.lock")


def refuse_others(folder: Path, own: Container[str]) -> None:
    """Raise `FileExistsError` if `folder` holds files of other names, such as a download: what
    replaces a damaged folder removes all of it."""
    strange = folder.exists() and (
        not folder.is_dir() or any(entry.name not in own for entry in folder.iterdir())
    )
    if strange:
        raise FileExistsError(17, "is in the way: it holds files that are not ours", str(folder))


def to_disk(file: IO[bytes] | IO[str]) -> None:
    """Flush a file, so that a later rename cannot reach the disk before the data."""
    file.flush()
    os.fsync(file.fileno())


def put_in_place(aside: Path, place: Path) -> None:
    """Rename a file or folder whose files are on the disk, so that the new name is there, too.
    Raises `OSError`."""
    if aside.is_dir():
        sync_folder(aside)
    aside.rename(place)
    sync_folder(place.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _move(aside: Path, folder: Path, sound: Callable[[], bool]) -> None:
    for _ in range(10):
        try:
            put_in_place(aside, folder)
            return
        except OSError:
            if not folder.exists():
                raise
        if sound():
            return
        damaged = aside.with_name(aside.name + ".damaged")
        try:
            os.rename(folder, damaged)
        except FileNotFoundError:  # another machine has moved it
            continue
        _remove(damaged)
    raise FileExistsError(17, "is replaced by others again and again", str(folder))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
