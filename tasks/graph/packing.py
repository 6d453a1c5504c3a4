"""How the features that batches need are laid out on disk ahead of training.

A plan of the store diskgnn has, beside its samples, one file of rows, `packed.bin`:

    cached    the nodes that most batches need; they are in memory (or on the GPU) in training
    for each segment, a few batches that follow each other:
        shared    the nodes that many of its batches need, once. Those that the same batches need
                  lie together, so that a batch reads whole pages
        own       for each batch, the rest of what it needs, together, in the order of the ids

Own rows are read without a byte too much, but the more batches a node is in the more often it is on
disk; shared rows are there once a segment, and read with what lies in the same pages. As few nodes
are shared as the limit of disk allows.

The file is filled in passes over the file of features, each for as many batches as memory allows.
Idea: Liu et al., "DiskGNN" (arXiv 2405.05231), there with a disk cache for each segment that is
ordered by MinHash.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from co2.atomic import to_disk
from co2.errors import ConfigError
from tasks.graph.direct import PAGE, DirectFile, gathered
from tasks.graph.folder import GraphFolder
from tasks.graph.plan import Draft
from tasks.graph.sampling import looked_up
from tasks.graph.verified import write_sums
from tasks.shared.progress import progress

LONGEST_SEGMENT = 64
"""Batches: each has a bit."""
_PASS_ROW_BYTES = 64
"""Of memory that a pass takes for each row that it writes."""
_PIECE = 1 << 25
"""Bytes of the file of features that are read at once."""


@dataclass(frozen=True)
class Layout:
    """What a plan is packed for."""

    graph: GraphFolder
    device_rows: int
    """Rows that are cached on the training device."""
    host_rows: int
    """Rows that are cached in memory."""
    segment: int
    """Batches of a segment, at most `LONGEST_SEGMENT`."""
    blow_up: float
    """Most bytes of packed.bin, over those of the features."""
    memory: int
    """Bytes that a pass may take."""

    def pack(self, draft: Draft) -> dict[str, object]:
        """Finish a plan. Each note is a row of the batch's own numbering: cached rows, then its
        segment's shared ones, then its own.

        Raises:
            ConfigError: the batches need more disk than allowed.
        """
        return _Packing(self, draft).done()


class _Packing:
    def __init__(self, layout: Layout, draft: Draft) -> None:
        self.layout, self.draft = layout, draft
        self.row_bytes = layout.graph.row_bytes
        self.segments = [
            range(first, min(first + layout.segment, draft.num_batches))
            for first in range(0, draft.num_batches, layout.segment)
        ]
        self.cached = self._popular()
        self.slot = np.full(layout.graph.num_nodes, -1, np.int32)
        self.slot[self.cached] = np.arange(len(self.cached))

    def done(self) -> dict[str, object]:
        least = self._least_shared()
        regions: list[tuple[int, int]] = []
        self.draft.write_notes(self._laid_out(least, regions))
        pages = regions[-1][0] + self._pages(regions[-1][1])
        path = self.draft.folder / "packed.bin"
        with path.open("wb") as file:
            if pages:
                os.posix_fallocate(file.fileno(), 0, pages * PAGE)
        self._fill(path, least)
        write_sums(path, self.draft.readers, _PIECE)
        return {"cached": len(self.cached), "shared_from": least, "regions": regions}

    def _popular(self) -> np.ndarray:
        """The nodes to cache, the most wanted first; a node that one batch needs is none."""
        layout = self.layout
        wanted = np.zeros(layout.graph.num_nodes, np.int32)
        for number in range(self.draft.num_batches):
            wanted[self.draft.nodes(number)] += 1
        several = np.flatnonzero(wanted > 1)
        order = np.argsort(-wanted[several], kind="stable")
        return several[order[: layout.device_rows + layout.host_rows]]

    def _others(self, segment: range) -> list[np.ndarray]:
        """Nodes of each batch that are not cached, ascending."""
        found = (self.draft.nodes(number) for number in segment)
        return [np.sort(nodes[self.slot[nodes] < 0]) for nodes in found]

    def _least_shared(self) -> int:
        """In how many batches of a segment a node must be to be shared: the largest number for
        which the file is within the limit."""
        rows = np.zeros(self.layout.segment + 2, np.int64)  # in the file, by that number
        for segment in self.segments:
            _, times = np.unique(np.concatenate(self._others(segment)), return_counts=True)
            nodes = np.bincount(times, minlength=len(rows))
            for least in range(2, len(rows)):
                rows[least] += nodes[least:].sum() + (nodes[:least] * np.arange(least)).sum()
        size = (rows + len(self.cached)) * self.row_bytes
        whole = self.layout.graph.features_bytes
        allowed = np.flatnonzero(size[2:] <= self.layout.blow_up * whole)
        if len(allowed) == 0:
            hint = f"the batches of a plan need {size[2] / whole:.2f} at least"
            ways = "allow that, or plan fewer batches at once (graph.plan)"
            raise ConfigError("graph.blow_up", self.layout.blow_up, f"{hint}; {ways}")
        return 2 + int(allowed[-1])

    def _shared(self, parts: list[np.ndarray], least: int) -> np.ndarray:
        """The shared nodes of a segment in the order of the file, from those of its batches."""
        nodes, inverse, times = np.unique(
            np.concatenate(parts), return_inverse=True, return_counts=True
        )
        bits = np.repeat(
            np.uint64(1) << np.arange(len(parts), dtype=np.uint64), list(map(len, parts))
        )
        order = np.argsort(inverse, kind="stable")
        starts = times.cumsum() - times
        batches = np.bitwise_or.reduceat(bits[order], starts) if len(nodes) else bits
        many = times >= least
        # In the order of Gray's code, neighbours differ in few batches.
        return nodes[many][np.argsort(_gray_rank(batches[many]), kind="stable")]

    def _regions(self, least: int) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """For each segment its shared nodes, and for each of its batches its own."""
        for segment in self.segments:
            parts = self._others(segment)
            shared = self._shared(parts, least)
            yield shared, [np.setdiff1d(part, shared, assume_unique=True) for part in parts]

    def _laid_out(self, least: int, regions: list[tuple[int, int]]) -> Iterator[np.ndarray]:
        """Yield the notes; append the first page and the rows of each part of the file."""
        page = 0

        def add(rows: int) -> None:
            nonlocal page
            regions.append((page, rows))
            page += self._pages(rows)

        add(len(self.cached))
        for segment, (shared, owns) in zip(self.segments, self._regions(least), strict=True):
            add(len(shared))
            by_id = np.argsort(shared)
            for number, own in zip(segment, owns, strict=True):
                add(len(own))
                nodes = self.draft.nodes(number)
                note = self.slot[nodes].astype(np.int64)
                others = np.flatnonzero(note < 0)
                of_all = nodes[others]
                is_own, place = looked_up(of_all, own)
                note[others[is_own]] = len(self.cached) + len(shared) + place[is_own]
                rest = np.searchsorted(shared, of_all[~is_own], sorter=by_id)
                note[others[~is_own]] = len(self.cached) + by_id[rest]
                yield note

    def _fill(self, path: Path, least: int) -> None:
        """Write the rows, in passes over the file of features."""
        graph, readers = self.layout.graph, self.draft.readers
        source = DirectFile(graph.features_path, readers, graph.features_bytes)
        most = self.layout.memory // _PASS_ROW_BYTES
        nodes, offsets = [self.cached], [self._offsets(0, len(self.cached))]
        page = self._pages(len(self.cached))
        with path.open("r+b") as file:
            for shared, owns in self._regions(least):
                for part in (shared, *owns):
                    nodes.append(part)
                    offsets.append(self._offsets(page, len(part)))
                    page += self._pages(len(part))
                if sum(map(len, nodes)) >= most:
                    self._pass(source, file.fileno(), nodes, offsets)
                    nodes, offsets = [], []
            self._pass(source, file.fileno(), nodes, offsets)
            to_disk(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        source.close()

    def _pass(
        self, source: DirectFile, file: int, nodes: list[np.ndarray], offsets: list[np.ndarray]
    ) -> None:
        """Read the features once, and write the rows of these nodes to these bytes of the file."""
        ids = np.concatenate((np.empty(0, np.int64), *nodes))
        order = np.argsort(ids, kind="stable")
        ids, to = ids[order], np.concatenate((np.empty(0, np.int64), *offsets))[order]
        step, total = max(1, _PIECE // self.row_bytes), self.layout.graph.num_nodes
        with progress(f"packing {len(ids):,} rows", total) as advance:
            for low in range(0, total, step):
                high = min(low + step, total)
                within = slice(*np.searchsorted(ids, [low, high]))
                if len(ids[within]):
                    first, last = low * self.row_bytes // PAGE, self._pages(high)
                    read = source.pages(np.array([first]), np.array([last]))
                    by_place = np.argsort(to[within])
                    places = ids[within][by_place] * self.row_bytes - first * PAGE
                    self._write(file, gathered(read, places, self.row_bytes), to[within][by_place])
                advance(high - low)

    def _write(self, file: int, rows: np.ndarray, to: np.ndarray) -> None:
        """Write rows to these bytes, which ascend; those that follow each other at once."""
        cuts = np.flatnonzero(np.diff(to) != self.row_bytes) + 1
        view = rows.reshape(-1).data
        for first, last in zip([0, *cuts], [*cuts, len(to)], strict=True):
            part = view[first * self.row_bytes : last * self.row_bytes]
            done = 0
            while done < len(part):
                done += os.pwrite(file, part[done:], int(to[first]) + done)

    def _offsets(self, page: int, rows: int) -> np.ndarray:
        return page * PAGE + np.arange(rows) * self.row_bytes

    def _pages(self, rows: int) -> int:
        return -(-rows * self.row_bytes // PAGE)


def _gray_rank(codes: np.ndarray) -> np.ndarray:
    """The place of each code, uint64, in Gray's order."""
    rank = codes.copy()
    for shift in (1, 2, 4, 8, 16, 32):
        rank ^= rank >> np.uint64(shift)
    return rank
