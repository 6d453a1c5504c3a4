"""A small graph at random, in the layout of tasks/graph/folder.py."""

from pathlib import Path

import numpy as np

from tasks.graph import folder as layout
from tasks.graph.folder import GraphFolder, create, neighbour_type, write_array


def write(
    folder: Path, nodes: int = 300, features: int = 6, dtype: str = "float32", seed: int = 0
) -> GraphFolder:
    """Write a graph with some hubs and some nodes without neighbours. Features tell the class, and
    neighbours are mostly of the same. Rows of 24 bytes and pages of 4096 have no common border."""
    random = np.random.default_rng(seed)
    degrees = random.geometric(0.15, nodes) - 1
    degrees[:5] = nodes // 3
    starts = np.concatenate(([0], degrees.cumsum()))
    labels = random.integers(0, 3, nodes)
    alike = 1 + 9.0 * (labels[:, None] == labels)
    neighbours = np.concatenate(
        [
            np.sort(random.choice(nodes, degree, replace=False, p=weight / weight.sum()))
            for degree, weight in zip(degrees, alike, strict=True)
        ]
    )
    labels[-nodes // 10 :] = -1
    noise = random.normal(size=(nodes, features))
    values = (noise + 2 * (np.arange(features) % 3 == labels[:, None])).astype(dtype)
    labelled = random.permutation(np.flatnonzero(labels >= 0))
    cuts = [len(labelled) * 6 // 10, len(labelled) * 8 // 10]
    parts = dict(zip(layout.PARTS, np.split(labelled, cuts), strict=True))

    def fill(aside: Path) -> dict[str, object]:
        kind = neighbour_type(nodes)
        write_array(aside / "starts.bin", [starts], np.int64)
        write_array(aside / "neighbours.bin", [neighbours], kind)
        write_array(aside / "features.bin", [values], dtype)
        write_array(aside / "labels.bin", [labels], layout.LABEL)
        for part, own in parts.items():
            write_array(aside / f"{part}.bin", [np.sort(own)], np.int64)
        return {
            "nodes": nodes,
            "edges": len(neighbours),
            "features": features,
            "classes": 3,
            "parts": {part: len(own) for part, own in parts.items()},
            "types": {"features": dtype, "neighbours": kind.name},
        }

    return create(folder, fill, {"name": "small"})
