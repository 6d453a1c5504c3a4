"""Features from caches and from a file in which each batch finds its own together.

How they are laid out: packing.py. One thread reads ahead while another one puts batches together.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tasks.graph.ahead import ahead
from tasks.graph.direct import PAGE, Readers, read_rows
from tasks.graph.folder import GraphFolder
from tasks.graph.packing import Layout
from tasks.graph.plan import Plan
from tasks.graph.planned import Plans
from tasks.graph.sampling import Neighbourhood
from tasks.graph.stores import Batched, Cached, Loaded, copy_rows, empty_rows
from tasks.graph.verified import VerifiedFile


@dataclass(frozen=True)
class _Read:
    """What came from the disk for a batch."""

    whole: Neighbourhood
    notes: np.ndarray
    shared_rows: np.ndarray
    """int64: of its segment's shared rows, those that the batch needs, ascending."""
    shared: np.ndarray
    """Those rows, uint8."""
    own: np.ndarray
    """Own rows, uint8."""
    own_from: int
    """The note of the first own row."""


class DiskGNN:
    """The store diskgnn.

    Args:
        graph: the graph.
        plans: of the batches, finished by `layout.pack`.
        layout: how they are packed.
        readers: threads that read.
        device: where training happens.
    """

    def __init__(
        self,
        graph: GraphFolder,
        plans: Plans,
        layout: Layout,
        readers: Readers,
        device: torch.device,
    ) -> None:
        self.totals, self._plans, self._graph = plans.totals, plans, graph
        self._layout, self._readers, self._device = layout, readers, device

    def stream(self, start: int) -> Batched:
        """See `Store.stream`."""
        return self._plans.stream(self._load, start)

    def _load(self, plan: Plan, numbers: range) -> Iterator[Loaded]:
        file = VerifiedFile(plan.folder / "packed.bin", self._readers)
        cached = self._cached(file, plan.meta["cached"])
        for read in ahead(self._read(plan, file, numbers), 1):
            yield self._put_together(read, *cached)

    def _cached(self, file: VerifiedFile, rows: int) -> tuple[Tensor, Tensor]:
        """The caches on the training device and in memory."""
        on_device = min(self._layout.device_rows, rows)
        moved = self._from_disk(file, range(on_device)).to(self._device)
        return moved, self._from_disk(file, range(on_device, rows))

    def _from_disk(self, file: VerifiedFile, rows: range) -> Tensor:
        """These rows of the file's beginning."""
        table = empty_rows(self._graph, len(rows))
        copy_rows(table, file, rows, self._graph)
        return table

    def _read(self, plan: Plan, file: VerifiedFile, numbers: range) -> Iterator[_Read]:
        regions, cached = plan.meta["regions"], plan.meta["cached"]
        for number in numbers:
            # Beside the cached rows, every segment has a region and so has each of its batches.
            segment, place = divmod(number, self._layout.segment)
            of_segment = 1 + segment * (self._layout.segment + 1)
            shared_page, num_shared = regions[of_segment]
            own_page, num_own = regions[of_segment + 1 + place]
            notes = plan.notes(number)
            own_from = cached + num_shared
            shared_rows = np.sort(notes[(notes >= cached) & (notes < own_from)]) - cached
            before = file.file.bytes_read
            shared = read_rows(file, shared_rows, self._row_bytes, shared_page)
            size = num_own * self._row_bytes
            pages = file.pages(np.array([own_page]), np.array([own_page + -(-size // PAGE)]))
            own = pages[:size].reshape(num_own, self._row_bytes)
            self.totals.read_bytes += file.file.bytes_read - before
            self.totals.needed_bytes += shared.nbytes + own.nbytes
            whole = plan.neighbourhood(number)
            yield _Read(whole, notes, shared_rows, shared, own, own_from)

    def _put_together(self, read: _Read, on_device: Tensor, in_memory: Tensor) -> Loaded:
        notes = read.notes
        # The place of each node among those whose features are made here.
        here = notes >= len(on_device)
        place = here.cumsum() - 1
        features = empty_rows(self._graph, int(here.sum()))
        cached = len(on_device) + len(in_memory)
        own = np.flatnonzero(notes >= read.own_from)
        shared = np.flatnonzero((notes >= cached) & (notes < read.own_from))
        held = np.flatnonzero(here & (notes < cached))
        for nodes, table, rows in (
            (own, self._rows(read.own), notes[own] - read.own_from),
            (
                shared,
                self._rows(read.shared),
                np.searchsorted(read.shared_rows, notes[shared] - cached),
            ),
            (held, in_memory, notes[held] - len(on_device)),
        ):
            features[torch.from_numpy(place[nodes])] = table[torch.from_numpy(rows)]
        if len(on_device) == 0:
            return Loaded(read.whole, features)
        there = np.flatnonzero(~here)
        parts = notes[there], there, np.flatnonzero(here)
        return Loaded(read.whole, features, Cached(on_device, *map(torch.from_numpy, parts)))

    def _rows(self, data: np.ndarray) -> Tensor:
        return torch.from_numpy(data.view(self._graph.dtype))

    @property
    def _row_bytes(self) -> int:
        return self._graph.row_bytes
