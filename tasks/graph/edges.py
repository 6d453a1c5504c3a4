"""Edges to rows of neighbours, in bounded memory: graphs may have some billions of edges.

Edges are spilled into bucket files by ranges of their target, each as one number of 64 bits, target
above source. A bucket that fits into memory is sorted there; a larger one, as ranges with popular
nodes have, is divided again. Buckets ascend, so their rows follow one another in the files.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from co2.atomic import to_disk
from tasks.graph.folder import neighbour_type

MEMORY = 1 << 30
"""Bytes, by default."""
_WAYS = 64
"""Buckets that are written at once; a range of 2³² nodes is divided six times at most."""
_COPIES = 4
"""A sorted bucket, what is sorted of it and what is kept lie in memory side by side."""
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)

Edges = tuple[np.ndarray, np.ndarray]
"""Sources and targets, whole numbers, [E] each. A target sees the features of its sources."""


def write_rows(
    folder: Path,
    edges: Iterable[Edges],
    num_nodes: int,
    *,
    undirected: bool,
    distinct: bool,
    memory: int = MEMORY,
) -> int:
    """Write starts.bin and neighbours.bin into `folder`, each row ascending, without self-loops.

    The largest pieces in memory are a piece of `edges`, a few times over, and `memory`. While it
    runs, `folder` holds 8 bytes for every edge besides (16 for every edge if it is undirected).

    Args:
        edges: pieces of edges, iterated once.
        num_nodes: below 2³²; every end of an edge is below it.
        undirected: whether each edge leads both ways.
        distinct: whether edges that recur are kept once.
        memory: bytes that a bucket may take.
    Returns:
        The number of edges that were written.
    Raises:
        ValueError: an edge names a node outside of the graph; the text tells which.
        OSError: the folder cannot be written.
    """
    assert num_nodes < 2**32, "nodes are numbered in 32 bits here"
    scratch = folder / "edges"
    scratch.mkdir()
    keys = _keys(edges, num_nodes, undirected)
    written = 0
    with (
        (folder / "starts.bin").open("wb") as starts,
        (folder / "neighbours.bin").open("wb") as rows,
    ):
        starts.write(np.zeros(1, np.int64).data)
        for low, high, part in _sorted_buckets(scratch, keys, 0, num_nodes, memory):
            if distinct and len(part):
                part = part[np.concatenate([[True], part[1:] != part[:-1]])]
            targets = (part >> _HALF).astype(np.int64) - low
            degrees = np.bincount(targets, minlength=high - low)
            starts.write((written + np.cumsum(degrees, dtype=np.int64)).data)
            rows.write((part & _LOW).astype(neighbour_type(num_nodes)).data)
            written += len(part)
        to_disk(starts)
        to_disk(rows)
    scratch.rmdir()
    return written


def _keys(edges: Iterable[Edges], num_nodes: int, undirected: bool) -> Iterator[np.ndarray]:
    """Each edge as one number, uint64 pieces; without self-loops."""
    for sources, targets in edges:
        for side in (sources, targets):
            if len(side) and not 0 <= side.min() <= side.max() < num_nodes:
                wrong = side[(side < 0) | (side >= num_nodes)][0]
                raise ValueError(f"an edge names node {wrong}, the nodes are 0 to {num_nodes - 1}")
        kept = sources != targets
        ends = sources[kept].astype(np.uint64), targets[kept].astype(np.uint64)
        yield (ends[1] << _HALF) | ends[0]
        if undirected:
            yield (ends[0] << _HALF) | ends[1]


def _sorted_buckets(
    scratch: Path, keys: Iterable[np.ndarray], low: int, high: int, memory: int
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield ranges of targets that together are low to high - 1, and their edges, sorted."""
    width = max(1, -(-(high - low) // _WAYS))
    bounds = [(first, min(first + width, high)) for first in range(low, high, width)]
    files = [scratch / f"{first}-{last}" for first, last in bounds]
    with ExitStack() as stack:
        opened = [stack.enter_context(file.open("wb")) for file in files]
        for piece in keys:
            of = ((piece >> _HALF).astype(np.int64) - low) // width
            piece = piece[np.argsort(of.astype(np.uint8), kind="stable")]
            ends = np.cumsum(np.bincount(of, minlength=len(files)))
            for sink, own in zip(opened, np.split(piece, ends[:-1]), strict=True):
                sink.write(own.data)
    for (first, last), file in zip(bounds, files, strict=True):
        size = file.stat().st_size
        if size * _COPIES > memory and last - first > 1:
            yield from _sorted_buckets(scratch, _pieces(file, memory), first, last, memory)
        else:  # one node's neighbours are sorted in memory, however many they are
            part = np.fromfile(file, np.uint64)
            part.sort()
            yield first, last, part
        file.unlink()


def _pieces(file: Path, memory: int) -> Iterator[np.ndarray]:
    count = max(1, memory // (8 * 2 * _COPIES))
    with file.open("rb") as opened:
        while len(piece := np.fromfile(opened, np.uint64, count)):
            yield piece
