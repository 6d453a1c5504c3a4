"""Direct reads: past the page cache, in whole pages, by threads that overlap.

Where the file system knows no direct I/O (tmpfs), the page cache is used; `DirectFile.direct` says
which.
"""

import errno
import math
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

PAGE = 4096
"""Bytes; what is read begins and ends at a multiple."""
_LONGEST = 1 << 20
"""Bytes of one read."""


class Readers:
    """Threads that wait for the disk, for any number of files.

    Args:
        number: of threads.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.pool = ThreadPoolExecutor(number, thread_name_prefix="disk")


class DirectFile:
    """An open file that several threads read at once.

    Args:
        path: the file.
        readers: threads that read; a read waits for all of its own.
        size: bytes that the file has; None: as many as it has now.
    Raises:
        OSError: the file cannot be read, or has another size.
    """

    def __init__(self, path: Path, readers: Readers, size: int | None = None) -> None:
        self._readers, self._file, self.bytes_read = readers, -1, 0
        """Bytes that have come from the file so far."""
        try:
            self._file, self.direct = os.open(path, os.O_RDONLY | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # no direct I/O here
                raise
            self._file, self.direct = os.open(path, os.O_RDONLY), False
        self.path, self.size = path, os.fstat(self._file).st_size
        if size not in (None, self.size):
            raise OSError(errno.EIO, f"has {self.size} bytes, not {size}", str(path))

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()

    def pages(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Read runs of pages.

        Args:
            first, last: int64 [runs], the numbers of the first page of each run and of the one
                after its last.
        Returns:
            uint8, one run after another, each of (last - first) * PAGE bytes; what would be behind
            the end of the file is 0.
        Raises:
            OSError: the file cannot be read, or is shorter than it was.
        """
        assert not len(last) or last.max() * PAGE < self.size + PAGE, "no such page"
        begins = np.concatenate(([0], (last - first).cumsum())) * PAGE
        total = int(begins[-1])
        if total == 0:
            return np.empty(0, np.uint8)
        buffer = mmap.mmap(-1, total)  # begins at a page, as direct I/O asks for
        view = memoryview(buffer)
        pieces = [
            (int(page) * PAGE + at, view[int(begin) + at : int(begin) + min(at + _LONGEST, length)])
            for page, begin, length in zip(first, begins, (last - first) * PAGE, strict=False)
            for at in range(0, int(length), _LONGEST)
        ]
        # One task for several pieces, because a task of its own costs as much as a read.
        share = -(-len(pieces) // self._readers.number)
        shares = [pieces[at : at + share] for at in range(0, len(pieces), share)]
        # Another thread is slower than this one where nothing can overlap.
        perform = map if len(shares) == 1 else self._readers.pool.map
        self.bytes_read += sum(perform(self._read, shares))
        return np.frombuffer(buffer, np.uint8)

    def _read(self, pieces: Sequence[tuple[int, memoryview]]) -> int:
        done = 0
        for offset, into in pieces:
            wanted = min(len(into), self.size - offset)
            came = 0
            while came < wanted:
                found = os.preadv(self._file, [into[came:]], offset + came)
                if found == 0:
                    raise OSError(errno.EIO, "is shorter than it was", str(self.path))
                came += found
            done += came
        return done


class Pages(Protocol):
    """What reads runs of pages: `DirectFile`, or a file that is checked, too."""

    def pages(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """See `DirectFile.pages`."""
        ...


def read_rows(file: Pages, numbers: np.ndarray, row_bytes: int, first_page: int = 0) -> np.ndarray:
    """Read rows of a table.

    Args:
        file: where the table is.
        numbers: int64 [rows], ascending, without repetition.
        row_bytes: size of a row.
        first_page: where the table begins.
    Returns:
        uint8 [rows, row_bytes].
    """
    if len(numbers) == 0:
        return np.empty((0, row_bytes), np.uint8)
    offsets = first_page * PAGE + numbers * row_bytes
    first, last = offsets // PAGE, -(-(offsets + row_bytes) // PAGE)
    # Rows whose pages follow each other without a gap are one run.
    begins = np.ones(len(numbers), bool)
    begins[1:] = first[1:] > last[:-1]
    heads = np.flatnonzero(begins)
    tails = np.append(heads[1:], len(numbers)) - 1
    read = file.pages(first[heads], last[tails])
    sizes = (last[tails] - first[heads]) * PAGE
    # Where each run lies in what was read, beside where it lies in the file.
    moved = sizes.cumsum() - sizes - first[heads] * PAGE
    return gathered(read, offsets + moved[begins.cumsum() - 1], row_bytes)


def gathered(data: np.ndarray, places: np.ndarray, length: int) -> np.ndarray:
    """Bytes `places[i]` to `places[i] + length` of `data`, [i, length]. Other threads may run."""
    step = math.gcd(length, PAGE)  # every place is a multiple
    table = torch.from_numpy(data).as_strided(((len(data) - length) // step + 1, length), (step, 1))
    return table[torch.from_numpy(places // step)].numpy()
