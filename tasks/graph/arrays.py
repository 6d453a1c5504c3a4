"""NumPy's arrays in files, read from beginning to end in pieces: .npy, a member of .npz, raw.

np.load maps a .npy file, but reads all of a member of .npz at once, which has 57 GB for
ogbn-papers100M. The format of a .npy file: numpy.lib.format, in NumPy's reference.
"""

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO

import numpy as np

from co2.errors import ConfigError, first_line, require

_MAGIC = b"\x93NUMPY"
_DAMAGED = zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError
"""What a torn or foreign file raises; NotImplementedError: an unknown compression."""


@dataclass(frozen=True)
class Stored:
    """An array of numbers in a file."""

    path: Path
    member: str | None
    """Of an .npz file, without ".npy"."""
    shape: tuple[int, ...]
    dtype: np.dtype
    by_columns: bool
    """Whether its first index runs fastest (Fortran's order)."""
    begin: int
    """Bytes before the numbers."""

    @property
    def name(self) -> str:
        """For errors."""
        return str(self.path) if self.member is None else f"{self.path}, {self.member}"

    def pieces(self, count: int, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """Yield the numbers `start` to `stop` - 1 as they lie in the file, `count` at a time."""
        stop = prod(self.shape) if stop is None else stop
        with _opened(self.path, self.member) as file:
            file.seek(self.begin + start * self.dtype.itemsize)
            for at in range(start, stop, count):
                size = min(count, stop - at) * self.dtype.itemsize
                data = file.read(size)
                if len(data) < size:
                    raise EOFError("it ends too early")
                yield np.frombuffer(data, self.dtype)

    def rows(self, num_bytes: int) -> Iterator[np.ndarray]:
        """Yield rows, [piece, …], of about `num_bytes` together."""
        hint = f"{self.name} lies by columns, which are not read here"
        require(not self.by_columns, "--source", self.path.parent, hint)
        width = prod(self.shape[1:])
        step = max(1, num_bytes // (width * self.dtype.itemsize))
        for piece in self.pieces(step * width):
            yield piece.reshape(-1, *self.shape[1:])

    def pairs(self, axis: int, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield first and second numbers of the pairs along an axis: [2, E] has axis 0, [E, 2] 1.

        Where one half follows the other in the file, it is read in two places at a time.
        """
        whole = self.shape[1 - axis]
        if self.by_columns == (axis == 0):
            for piece in self.pieces(2 * count):
                yield piece[::2], piece[1::2]
        else:
            halves = self.pieces(count, 0, whole), self.pieces(count, whole)
            yield from zip(*halves, strict=True)


def stored(path: Path, member: str | None = None, raw: tuple[int, ...] | None = None) -> Stored:
    """Read the head of an array.

    Args:
        path: a .npy or .npz file.
        member: of an .npz file, without ".npy".
        raw: the shape of a row in a file without a head, whose numbers are float32, if there may be
            such.
    Raises:
        ConfigError: the file is missing or damaged, or holds no numbers.
    """
    hint = f"does not hold {path.name}"
    require(path.is_file(), "--source", path.parent, hint)
    with _opened(path, member) as file:
        if raw is not None and file.read(len(_MAGIC)) != _MAGIC:
            size, width = path.stat().st_size, 4 * prod(raw)
            if size % width or not size:
                raise ValueError(f"its {size} bytes are no rows of {width}")
            return Stored(path, member, (size // width, *raw), np.dtype(np.float32), False, 0)
        file.seek(0)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            read = np.lib.format.read_array_header_2_0
        shape, by_columns, dtype = read(file)
        if dtype.kind not in "fiu":
            raise ValueError(f"it holds {dtype}, and numbers are needed")
        found = Stored(path, member, shape, dtype, by_columns, file.tell())
    if member is None and path.stat().st_size < found.begin + prod(shape) * dtype.itemsize:
        raise ConfigError("--source", path.parent, f"{path.name} is damaged (it ends too early)")
    return found


@contextmanager
def _opened(path: Path, member: str | None) -> Iterator[IO[bytes]]:
    """Open an array's file. What a damaged one raises while it is open is a `ConfigError`."""
    try:
        if member is None:
            with path.open("rb") as file:
                yield file
            return
        with zipfile.ZipFile(path) as archive:
            if f"{member}.npy" not in archive.namelist():
                raise ValueError(f"it has no array {member}")
            with archive.open(f"{member}.npy") as inner:
                yield inner
    except ConfigError:  # a ValueError, too
        raise
    except _DAMAGED as error:
        hint = f"{path.name} is damaged ({first_line(error)})"
        raise ConfigError("--source", path.parent, hint) from None
