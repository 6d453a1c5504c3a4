"""A graph by rule, as large as is wanted: communities, popular nodes, features that blur the class.

Every class is a community of nodes / classes nodes. Each node makes about degree / 2 edges; the
other end is in its own community with probability `SAME`, anywhere else otherwise. Within a
community of M nodes, an end is the node of rank ⌊M·u^`SKEW`⌋ for a uniform u, so that the expected
degree of rank r falls as r^(1/SKEW − 1): its distribution has a tail with exponent
1 + SKEW / (SKEW − 1) = 2.5. Every edge leads both ways, and those that recur are one.

A node's features are the mean of its class plus standard normal noise. The means are apart by about
`APART`, however many features there are, so a node alone tells little, and the average over its
neighbours, whose noise is smaller by the root of their number, tells the class.

Ranks are shuffled into node numbers. A tenth of the nodes is in train, a fiftieth each in val and
test, and the others have no label. Everything is drawn in pieces of fixed sizes from generators
whose keys are the seed and the piece, so it depends on the arguments alone.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from co2.atomic import locked
from co2.errors import require, require_count
from tasks.graph.edges import Edges, write_rows
from tasks.graph.folder import (
    LABEL,
    PARTS,
    GraphFolder,
    create,
    neighbour_type,
    open_graph,
    write_array,
)
from tasks.shared.progress import progress
from tasks.shared.randomness import generator

SAME = 0.7
SKEW = 3
APART = 1.5
"""In standard deviations of the noise."""
_SHARES = {"train": 10, "val": 50, "test": 50}
"""One node in so many."""
_NODES, _PARTS, _MEANS, _EDGES, _NOISE = range(5)
"""What is drawn: the second number of a generator's key."""
_EDGES_AT_ONCE = 1 << 20
_VALUES_AT_ONCE = 1 << 22


def generate(
    folder: Path,
    nodes: int,
    features: int,
    classes: int,
    degree: int,
    seed: int,
    dtype: str = "float32",
) -> GraphFolder:
    """Make the graph in `folder`, or open it where it is there already.

    Some 30 bytes for each node lie in memory, a few hundred MB besides, and never the features.

    Args:
        folder: place of the graph.
        nodes: at least 4 for each class.
        features: of a node.
        classes: communities.
        degree: mean number of neighbours, nearly; edges that recur are dropped.
        seed: for another graph of the same kind.
        dtype: of the features, "float32" or "float16".
    Raises:
        ConfigError: an argument is out of range.
        FileExistsError: the folder holds a graph of other arguments.
        OSError: the folder cannot be written.
    """
    require_count("features", features)
    require(2 <= classes <= np.iinfo(LABEL).max, "classes", classes, "must be 2 to 32767")
    require(4 * classes <= nodes < 2**32, "nodes", nodes, "must be 4 a class or more, below 2**32")
    require(2 <= degree <= nodes // 2, "degree", degree, "must be 2 or more, at most nodes / 2")
    require(seed >= 0, "seed", seed, "must be 0 or more")
    require(dtype in ("float32", "float16"), "dtype", dtype, "must be float32 or float16")
    rule = {"nodes": nodes, "features": features, "classes": classes, "degree": degree}
    origin = {"name": "generated", "rule": {**rule, "seed": seed, "dtype": dtype}}
    with locked(folder):
        graph = open_graph(folder)
        if graph is None:
            recipe = _Recipe(nodes, features, classes, degree, seed)
            graph = create(folder, lambda aside: recipe.fill(aside, dtype), origin)
    if graph.meta.get("rule") != origin["rule"]:
        raise FileExistsError(17, "holds another graph; delete it first", str(folder))
    return graph


class _Recipe:
    def __init__(self, nodes: int, features: int, classes: int, degree: int, seed: int) -> None:
        self.nodes, self.features, self.classes = nodes, features, classes
        self.degree, self.seed = degree, seed
        self.kind = neighbour_type(nodes)

    def fill(self, folder: Path, dtype: str) -> dict[str, object]:
        """See `tasks.graph.folder.create`."""
        order = self._generator(_NODES).permutation(np.arange(self.nodes, dtype=self.kind))
        classes = np.empty(self.nodes, LABEL)
        classes[order] = np.arange(self.nodes) * self.classes // self.nodes
        num_edges = write_rows(
            folder, self._edges(order), self.nodes, undirected=True, distinct=True, memory=1 << 28
        )
        del order
        rows = blurred(classes, self.classes, self.features, self.seed)
        write_array(folder / "features.bin", rows, dtype)
        return {
            "nodes": self.nodes,
            "edges": num_edges,
            "features": self.features,
            "classes": self.classes,
            "parts": self._write_parts(folder, classes),
            "types": {"features": dtype, "neighbours": self.kind.name},
        }

    def _generator(self, *key: int) -> np.random.Generator:
        return generator(self.seed, *key)

    def _first(self, community: np.ndarray) -> np.ndarray:
        """The first rank of a community; it has those up to the first of the next."""
        return -(-community * self.nodes // self.classes)

    def _edges(self, order: np.ndarray) -> Iterator[Edges]:
        """Edges between nodes; `order` is the node of each rank."""
        whole = self.nodes * self.degree // 2
        with progress(f"drawing {whole:,} edges", whole) as advance:
            for piece, at in enumerate(range(0, whole, _EDGES_AT_ONCE)):
                draw, count = self._generator(_EDGES, piece), min(_EDGES_AT_ONCE, whole - at)
                ranks = (np.arange(at, at + count) * self.nodes) // whole
                community = ranks * self.classes // self.nodes
                other = draw.integers(self.classes, size=count)
                community = np.where(draw.random(count) < SAME, community, other)
                first = self._first(community)
                size = self._first(community + 1) - first
                popular = first + (size * draw.random(count) ** SKEW).astype(np.int64)
                yield order[popular], order[ranks]
                advance(count)

    def _write_parts(self, folder: Path, classes: np.ndarray) -> dict[str, int]:
        """Write train, val, test and, for their nodes, the labels; returns the parts' sizes."""
        parts = drawn_parts(self.nodes, self.seed)
        for name, own in parts.items():
            write_array(folder / f"{name}.bin", [own], np.int64)
        labels = np.full(self.nodes, -1, LABEL)
        for own in parts.values():
            labels[own] = classes[own]
        write_array(folder / "labels.bin", [labels], LABEL)
        return {name: len(own) for name, own in parts.items()}


def blurred(
    classes: np.ndarray, num_classes: int, features: int, seed: int
) -> Iterator[np.ndarray]:
    """Yield the features of nodes of the given classes, float32 [piece, features]."""
    # Two means with independent entries of variance s² are s·√(2·features) apart.
    spread = np.float32(APART / (2 * features) ** 0.5)
    means = generator(seed, _MEANS).standard_normal((num_classes, features), np.float32) * spread
    step = max(1, _VALUES_AT_ONCE // features)
    with progress("drawing features", len(classes)) as advance:
        for piece, at in enumerate(range(0, len(classes), step)):
            own = classes[at : at + step]
            rows = generator(seed, _NOISE, piece).standard_normal((len(own), features), np.float32)
            rows += means[own]
            yield rows
            advance(len(own))


def drawn_parts(nodes: int, seed: int) -> dict[str, np.ndarray]:
    """Return the nodes of each part, ascending; no node is in two."""
    shuffled = generator(seed, _PARTS).permutation(np.arange(nodes, dtype=neighbour_type(nodes)))
    parts, at = {}, 0
    for name in PARTS:
        size = max(1, nodes // _SHARES[name])
        parts[name] = np.sort(shuffled[at : at + size])
        at += size
    return parts
