"""Some parts of the graph at a time, whole in memory; batches see nothing else.

The nodes are divided into parts by their ids. Each epoch deals the parts anew into groups that fit
in memory. While a group is there, the nodes of its parts are trained on, and only neighbours in its
parts are sampled: every part is read once an epoch, from end to end, but models see other
neighbourhoods than with other stores. Idea: Waleffe et al., "MariusGNN" (EuroSys 2023, arXiv
2202.02365), which exchanges parts one by one.
"""

from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from co2.task import ReadTotals
from tasks.graph.batches import Batches
from tasks.graph.direct import DirectFile, Readers
from tasks.graph.folder import GraphFolder
from tasks.graph.sampling import Neighbourhood, Restricted
from tasks.graph.stores import Batched, DiskRows, Loaded, copy_rows, empty_rows
from tasks.shared.randomness import generator
from tasks.shared.sampling import Sampler, Stretches

_PARTS_KEY = 1
"""Beside seed and epoch, in the key of the order of the parts."""


@dataclass(frozen=True)
class Parts:
    """How nodes are divided.

    Nodes with neighbouring ids are in the same part.
    """

    num_nodes: int
    number: int
    """Of parts."""
    at_once: int
    """Parts of a group."""
    seed: int

    def groups(self, epoch: int) -> np.ndarray:
        """The group of each part in an epoch, int64 [number]."""
        order = generator(self.seed, epoch, _PARTS_KEY).permutation(self.number)
        found = np.empty(self.number, np.int64)
        found[order] = np.arange(self.number) // self.at_once
        return found

    def of(self, nodes: np.ndarray) -> np.ndarray:
        """The part of each node."""
        return nodes * self.number // self.num_nodes

    def nodes(self, part: int) -> range:
        """The nodes of a part."""
        first, last = (-(-edge * self.num_nodes // self.number) for edge in (part, part + 1))
        return range(first, last)


class GroupedSampler(Sampler):
    """Chooses samples as `Sampler` does, but in an order that takes group after group.

    Args:
        parts: of the nodes.
        nodes: int64, the node of each sample.
        num_workers, batch_size, seed, stretches, global_batch: as for `Sampler`.
    """

    def __init__(
        self,
        parts: Parts,
        nodes: np.ndarray,
        num_workers: int,
        batch_size: int,
        seed: int,
        stretches: Stretches = (),
        global_batch: int | None = None,
    ) -> None:
        super().__init__(len(nodes), num_workers, batch_size, seed, stretches, global_batch)
        self._parts, self._nodes = parts, nodes

    def _order(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            order = super()._order(epoch)
            groups = self._parts.groups(epoch)[self._parts.of(self._nodes[order])]
            self._permutation = order[np.argsort(groups, kind="stable")]
        return self._permutation


class Partition:
    """The store partition.

    Args:
        graph: the graph.
        batches: with a `GroupedSampler`.
        parts: of the nodes.
        readers: threads that read.
    """

    def __init__(
        self, graph: GraphFolder, batches: Batches, parts: Parts, readers: Readers
    ) -> None:
        self.totals = ReadTotals()
        self._graph, self._batches, self._parts = graph, batches, parts
        self._file = DirectFile(graph.features_path, readers, graph.features_bytes)
        self._rows = DiskRows(graph, readers, self.totals)

    def stream(self, start: int) -> Batched:
        """See `Store.stream`."""
        now, table, place = None, empty_rows(self._graph, 0), np.empty(0, np.int64)
        topology = self._batches.topology
        for draw in count(start):
            targets = self._batches.targets(draw)
            epoch = self._batches.sampler.epoch(draw)
            # A batch on the border of two groups belongs to that of its first node.
            groups = self._parts.groups(epoch)
            group = int(groups[self._parts.of(targets[:1])][0])
            if (epoch, group) != now:
                now = epoch, group
                del table  # before the next one is made
                table, place = self._load(np.flatnonzero(groups == group))
                topology = Restricted(self._batches.topology, place >= 0)
            whole = self._batches.seen(draw, topology)
            yield Loaded(whole, self._features(whole, table, place))

    def _load(self, parts: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """The features of all nodes of some parts, and the row of each node, -1 elsewhere."""
        before = self._file.bytes_read
        place = np.full(self._graph.num_nodes, -1, np.int64)
        ranges = [self._parts.nodes(int(part)) for part in parts]
        table, row = empty_rows(self._graph, sum(map(len, ranges))), 0
        for nodes in ranges:
            place[nodes.start : nodes.stop] = np.arange(row, row + len(nodes))
            copy_rows(table[row : row + len(nodes)], self._file, nodes, self._graph)
            row += len(nodes)
        self.totals.needed_bytes += table.nbytes
        self.totals.read_bytes += self._file.bytes_read - before
        return table, place

    def _features(self, whole: Neighbourhood, table: Tensor, place: np.ndarray) -> Tensor:
        rows = place[whole.nodes]
        outside = np.flatnonzero(rows < 0)  # targets beyond the border of the group
        features = table[torch.from_numpy(np.maximum(rows, 0))]
        features[torch.from_numpy(outside)] = self._rows.read(whole.nodes[outside])
        return features
