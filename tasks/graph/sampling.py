"""The neighbourhood of a batch of nodes, sampled layer by layer.

From the nodes of a batch outwards, every layer takes at most `fanout` neighbours of each node that
is known by then, uniformly and without replacement (Hamilton et al., "GraphSAGE", arXiv
1706.02216). All layers number nodes alike: those of the batch come first, then those that each
layer adds, in the order of their ids.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Layer:
    """Edges that lead to the first nodes of a neighbourhood."""

    starts: np.ndarray
    """int64 [nodes + 1]: where the edges of each node begin."""
    sources: np.ndarray
    """int64 [edges]: places in `Neighbourhood.nodes` of the neighbours that they come from."""


@dataclass(frozen=True)
class Neighbourhood:
    """What a model sees of a batch."""

    nodes: np.ndarray
    """int64: ids; the batch's own come first."""
    layers: tuple[Layer, ...]
    """The layer next to the features first. The last one leads to the batch's own nodes."""

    @property
    def num_targets(self) -> int:
        """The batch's own nodes."""
        return len(self.layers[-1].starts) - 1


class Topology:
    """Neighbours of every node.

    Args:
        starts, neighbours: as in `tasks.graph.folder`; they may be mapped.
    """

    def __init__(self, starts: np.ndarray, neighbours: np.ndarray) -> None:
        self.starts, self.neighbours = starts, neighbours

    def sample(
        self, nodes: np.ndarray, fanout: int, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sample neighbours.

        Args:
            nodes: int64 [n].
            fanout: most neighbours of a node; one that has no more keeps all.
            random: what chooses.
        Returns:
            int64 [n + 1], where the neighbours of each node begin, and their ids, int64.
        """
        first = self.starts[nodes]
        degree = self.starts[nodes + 1] - first
        taken = np.minimum(degree, fanout)
        starts = np.concatenate(([0], taken.cumsum()))
        # Edge j of node i is that node's neighbour number j, where the node keeps all.
        owner = np.repeat(np.arange(len(nodes)), taken)
        which = np.arange(starts[-1]) - starts[owner]
        many = np.flatnonzero(degree > fanout)
        if len(many):
            places = starts[many][:, None] + np.arange(fanout)
            which[places] = _distinct(degree[many], fanout, random)
        return starts, self.neighbours[first[owner] + which].astype(np.int64)

    def neighbourhood(
        self, targets: np.ndarray, fanout: tuple[int, ...], random: np.random.Generator
    ) -> Neighbourhood:
        """Sample the neighbourhood of a batch.

        Args:
            targets: int64, without repetition.
            fanout: of each layer, that next to the features first.
            random: what chooses.
        """
        nodes, layers = targets, []
        for most in reversed(fanout):
            starts, neighbours = self.sample(nodes, most, random)
            nodes = np.concatenate((nodes, np.setdiff1d(neighbours, nodes)))
            layers.append(Layer(starts, _places(nodes, neighbours)))
        return Neighbourhood(nodes, tuple(reversed(layers)))


class Restricted(Topology):
    """Neighbours of every node among some nodes.

    Args:
        whole: all neighbours.
        within: bool [nodes]: those nodes.
    """

    def __init__(self, whole: Topology, within: np.ndarray) -> None:
        super().__init__(whole.starts, whole.neighbours)
        self.within = within

    def sample(
        self, nodes: np.ndarray, fanout: int, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Topology.sample`: of the neighbours that are within."""
        first = self.starts[nodes]
        degree = self.starts[nodes + 1] - first
        owner = np.repeat(np.arange(len(nodes)), degree)
        offset = np.concatenate(([0], degree.cumsum()))
        found = self.neighbours[first[owner] + np.arange(offset[-1]) - offset[owner]]
        kept = self.within[found]
        starts = np.concatenate(([0], np.bincount(owner[kept], minlength=len(nodes)).cumsum()))
        # Those that are left are a topology of their own, in which the nodes are 0, 1, …
        own = Topology(starts, found[kept])
        return own.sample(np.arange(len(nodes)), fanout, random)


def _distinct(bounds: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """For each bound draw `count` distinct numbers below it: int64 [bounds, count].

    Floyd's algorithm: draw number j from those up to a limit that grows by one; what is there
    already is replaced by the limit. Every set is equally likely.
    """
    chosen = np.empty((len(bounds), count), np.int64)
    for drawn in range(count):
        limit = bounds - count + drawn
        number = random.integers(0, limit, endpoint=True)
        again = (chosen[:, :drawn] == number[:, None]).any(1)
        chosen[:, drawn] = np.where(again, limit, number)
    return chosen


def _places(nodes: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where each of `wanted` is in `nodes`, which has it once."""
    order = np.argsort(nodes, kind="stable")
    return order[np.searchsorted(nodes, wanted, sorter=order)]


def looked_up(nodes: np.ndarray, ascending: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of `nodes` are in `ascending`, bool, and their places there where they are."""
    place = np.searchsorted(ascending, nodes)
    held = np.zeros(len(nodes), bool)
    inside = place < len(ascending)
    held[inside] = ascending[place[inside]] == nodes[inside]
    return held, place
