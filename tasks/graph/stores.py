"""Where the features of a batch come from.

    memory      all features in memory
    mmap        the file, mapped; the page cache keeps what it likes
    ginex       a cache in memory that knows when each node is needed again        ginex.py
    partition   some parts of the graph at a time; batches see nothing else        partition.py
    diskgnn     caches, and a file in which each batch finds its own together      diskgnn.py

All but partition give the same batches, bit for bit.
"""

import mmap
from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from co2.task import ReadTotals
from tasks.graph.batches import Batches
from tasks.graph.direct import DirectFile, Pages, Readers, read_rows
from tasks.graph.folder import GraphFolder
from tasks.graph.sampling import Neighbourhood

_PIECE = 1 << 25
"""Bytes that are read at once."""


class StoreName(Enum):
    """The stores."""

    memory = "memory"
    mmap = "mmap"
    ginex = "ginex"
    partition = "partition"
    diskgnn = "diskgnn"


@dataclass(frozen=True)
class Cached:
    """Rows of a batch that are on the training device already."""

    table: Tensor
    """[rows, features], the same for many batches."""
    rows: Tensor
    """int64: which rows of it the batch needs."""
    at: Tensor
    """int64: their places in the batch."""
    others: Tensor
    """int64: the places of those that are not there."""


@dataclass(frozen=True)
class Loaded:
    """A batch with its features."""

    whole: Neighbourhood
    features: Tensor
    """[nodes, features], on the CPU; without those that are `cached`."""
    cached: Cached | None = None


Batched: TypeAlias = Generator[Loaded, None, None]


class Store(Protocol):
    """A store, for one worker."""

    totals: ReadTotals

    def stream(self, start: int) -> Batched:
        """Endless batches, from that with number `start` on. One thread goes through it.

        Raises:
            ConfigError: the disk is full, or cannot be read.
        """
        ...


class Rows(Protocol):
    """Features of any nodes."""

    def read(self, nodes: np.ndarray) -> Tensor:
        """The features of nodes in any order, without repetition: [nodes, features]."""
        ...


class ArrayRows:
    """Rows of an array in memory, [nodes, features]."""

    def __init__(self, features: np.ndarray) -> None:
        self._features = features

    def read(self, nodes: np.ndarray) -> Tensor:
        """See `Rows.read`."""
        return torch.from_numpy(self._features[nodes])


class MappedRows:
    """Rows of the file of features, mapped. The system reads no page that is not asked for: with
    its usual reading ahead a row of 2 kB costs 30 times as much.

    Args:
        graph: the graph.
        totals: counts what is read, as the system counts for the process.
    """

    def __init__(self, graph: GraphFolder, totals: ReadTotals) -> None:
        self._totals = totals
        with graph.features_path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.madvise(mmap.MADV_RANDOM)
        self._features = np.frombuffer(mapped, graph.dtype).reshape(graph.num_nodes, -1)

    def read(self, nodes: np.ndarray) -> Tensor:
        """See `Rows.read`."""
        before = _bytes_from_disk()
        found = torch.from_numpy(self._features[nodes])
        self._totals.needed_bytes += found.nbytes
        self._totals.read_bytes += _bytes_from_disk() - before
        return found


def _bytes_from_disk() -> int:
    """What this process has fetched from disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])


class DiskRows:
    """Rows of the file of features, by direct I/O.

    Args:
        graph: the graph.
        readers: threads that read.
        totals: counts what is read.
    """

    def __init__(self, graph: GraphFolder, readers: Readers, totals: ReadTotals) -> None:
        self._graph, self._totals = graph, totals
        self._file = DirectFile(graph.features_path, readers, graph.features_bytes)

    def read(self, nodes: np.ndarray) -> Tensor:
        """See `Rows.read`."""
        before = self._file.bytes_read
        order = np.argsort(nodes)
        rows = empty_rows(self._graph, len(nodes))
        found = read_rows(self._file, nodes[order], self._graph.row_bytes).view(self._graph.dtype)
        rows[torch.from_numpy(order)] = torch.from_numpy(found)
        self._totals.needed_bytes += rows.nbytes
        self._totals.read_bytes += self._file.bytes_read - before
        return rows


class Whole:
    """The stores memory and mmap: what a batch needs is read as it is.

    Args:
        batches: of the worker.
        rows: all features.
        totals: those that `rows` counts in.
    """

    def __init__(self, batches: Batches, rows: Rows, totals: ReadTotals) -> None:
        self.totals, self._batches, self._rows = totals, batches, rows

    def stream(self, start: int) -> Batched:
        """See `Store.stream`."""
        for draw in count(start):
            whole = self._batches.neighbourhood(draw)
            yield Loaded(whole, self._rows.read(whole.nodes))


def empty_rows(graph: GraphFolder, number: int) -> Tensor:
    """Memory for features of so many nodes."""
    shape = number, graph.num_features
    return torch.from_numpy(np.empty(shape, graph.dtype))


def copy_rows(into: Tensor, file: Pages, rows: range, graph: GraphFolder) -> None:
    """Read rows that follow each other, piece by piece, into as many of `into`."""
    step = max(1, _PIECE // graph.row_bytes)
    for at in range(0, len(rows), step):
        some = np.array(rows[at : at + step])
        found = read_rows(file, some, graph.row_bytes).view(graph.dtype)
        into[at : at + len(some)] = torch.from_numpy(found)
