"""Files whose every page has a sum, so that what is torn is found when it is read.

A file `name` has a file `name.sums` beside it, uint64 [pages]. The sum of a page is that of its
words and of its number, so that a page of zeros, which a crash leaves, does not pass for another.
Nothing here has to reach the disk before anything else: what did not is found.
"""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from tasks.graph.direct import PAGE, DirectFile, Readers

_ODD = np.uint64(0x9E3779B97F4A7C15)


class Torn(Exception):
    """A file does not hold what was written."""


def sums(data: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The sums of whole pages with these numbers, int64 [pages]: uint64 [pages]."""
    words = data.view(np.uint64).reshape(-1, PAGE // 8)
    found: np.ndarray = words.sum(1, dtype=np.uint64) + (numbers + 1).astype(np.uint64) * _ODD
    return found


def sums_path(path: Path) -> Path:
    """Where the sums of a file are."""
    return path.with_name(path.name + ".sums")


def write_sums(path: Path, readers: Readers, piece: int) -> None:
    """Read a file of whole pages, `piece` bytes at once, and write its sums beside it."""
    file, step = DirectFile(path, readers), piece // PAGE
    pages = file.size // PAGE
    found = [np.empty(0, np.uint64)]
    for at in range(0, pages, step):
        numbers = np.arange(at, min(at + step, pages))
        read = file.pages(numbers[:1], numbers[-1:] + 1)
        found.append(sums(read, numbers))
    file.close()
    np.concatenate(found).tofile(sums_path(path))


class VerifiedFile:
    """A file that is checked as it is read.

    Args:
        path: the file; it has whole pages.
        readers: threads that read.
    Raises:
        Torn: it does not have as many pages as sums.
    """

    def __init__(self, path: Path, readers: Readers) -> None:
        try:
            self._sums = np.fromfile(sums_path(path), np.uint64)
            self.file = DirectFile(path, readers)
        except FileNotFoundError as error:
            raise Torn(f"{error.filename} is missing") from None
        if self.file.size != len(self._sums) * PAGE:
            raise Torn(f"{path} has {self.file.size} bytes, not {len(self._sums) * PAGE}")

    def pages(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """As `DirectFile.pages`.

        Raises:
            Torn: a page is not what was written.
        """
        read, sizes = self.file.pages(first, last), last - first
        before = sizes.cumsum() - sizes  # pages of the runs before each
        numbers = np.repeat(first - before, sizes) + np.arange(sizes.sum())
        wrong = np.flatnonzero(sums(read, numbers) != self._sums[numbers])
        if len(wrong):
            raise Torn(f"{self.file.path} is damaged in its page {numbers[wrong[0]]}")
        return read


class RecordsWriter:
    """Writes a file of records, each a few arrays of whole numbers, which begins at a page.

    Args:
        path: of the file.
        dtype: of the numbers.
        backwards: whether the last record is written first.
    """

    def __init__(self, path: Path, dtype: np.dtype, backwards: bool = False) -> None:
        self.path, self.dtype, self._backwards = path, dtype, backwards
        self._file, self._page = path.open("wb"), 0
        self._sums: list[np.ndarray] = [np.empty(0, np.uint64)]
        self._index: list[list[int]] = []

    @property
    def index(self) -> list[list[int]]:
        """Where each record is: its first page, and the length of each array."""
        return self._index[:: -1 if self._backwards else 1]

    def __enter__(self) -> "RecordsWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if error is None:
            np.concatenate(self._sums).tofile(sums_path(self.path))

    def write(self, arrays: Sequence[np.ndarray]) -> None:
        """Append a record. All records have as many arrays."""
        data = np.concatenate(arrays).astype(self.dtype).view(np.uint8)
        padded = np.zeros(-(-len(data) // PAGE) * PAGE, np.uint8)
        padded[: len(data)] = data
        self._file.write(padded.data)
        pages = len(padded) // PAGE
        self._sums.append(sums(padded, np.arange(self._page, self._page + pages)))
        self._index.append([self._page, *map(len, arrays)])
        self._page += pages


class Records:
    """Reads what `RecordsWriter` wrote.

    Args:
        path, dtype: as for the writer.
        index: the writer's.
        readers: threads that read.
    Raises:
        Torn: the file is not what was written.
    """

    def __init__(
        self, path: Path, dtype: np.dtype, index: list[list[int]], readers: Readers
    ) -> None:
        self._verified, self._dtype, self._index = VerifiedFile(path, readers), dtype, index

    def read(self, number: int) -> list[np.ndarray]:
        """The arrays of a record, int64."""
        page, *lengths = self._index[number]
        size = sum(lengths) * self._dtype.itemsize
        data = self._verified.pages(np.array([page]), np.array([page + -(-size // PAGE)]))
        numbers = data[:size].view(self._dtype).astype(np.int64)
        return np.split(numbers, np.cumsum(lengths)[:-1])
