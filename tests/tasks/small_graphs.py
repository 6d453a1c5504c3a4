"""The public graphs with 40 nodes, each in the layout in which it is published."""

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

NODES = 40


@dataclass(frozen=True)
class Small:
    """What a written set holds."""

    folder: Path
    sources: np.ndarray
    targets: np.ndarray
    features: np.ndarray
    labels: np.ndarray
    """-1 for none."""


def drawn(
    folder: Path, features: int, dtype: type, classes: int, nodes: int = NODES, edges: int = 300
) -> Small:
    """Edges with self-loops and with some that recur; two thirds of the nodes have labels."""
    draw = np.random.default_rng(nodes)
    sources, targets = draw.integers(nodes, size=(2, edges))
    sources[:5], targets[:5], targets[5:10] = sources[5:10], targets[5:10], sources[5:10]
    rows = draw.normal(size=(nodes, features)).astype(dtype)
    labels = draw.integers(classes, size=nodes)
    labels[::3] = -1
    return Small(folder, sources, targets, rows, labels)


def unlabelled(labels: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    """As the sets have them, NaN for none."""
    return np.where(labels < 0, np.nan, labels).astype(dtype)


def split(small: Small) -> dict[str, np.ndarray]:
    """Parts in no order."""
    known = np.random.default_rng(3).permutation(np.flatnonzero(small.labels >= 0))
    return {"train": known[:12], "valid": known[12:18], "test": known[18:]}


def papers100m(folder: Path, compressed: bool = False, by_columns: bool = False) -> Small:
    small = drawn(folder, 6, np.float32, 172)
    (folder / "raw").mkdir(parents=True)
    save = np.savez_compressed if compressed else np.savez
    edges = np.stack([small.sources, small.targets])
    save(
        folder / "raw" / "data.npz",
        edge_index=np.asfortranarray(edges) if by_columns else edges,
        num_nodes_list=np.array([NODES]),
        num_edges_list=np.array([edges.shape[1]]),
        node_feat=small.features,
        node_year=np.zeros((NODES, 1), np.int64),
    )
    save(folder / "raw" / "node-label.npz", node_label=unlabelled(small.labels)[:, None])
    (folder / "split" / "time").mkdir(parents=True)
    for name, nodes in split(small).items():
        with gzip.open(folder / "split" / "time" / f"{name}.csv.gz", "wt") as file:
            file.write("".join(f"{node}\n" for node in nodes))
    return small


def mag240m(folder: Path, tensors: bool = False) -> Small:
    small = drawn(folder, 6, np.float16, 153)
    parts = split(small)
    labels = small.labels.copy()
    labels[parts["test"]] = -1  # not published
    papers = folder / "processed" / "paper"
    papers.mkdir(parents=True)
    np.save(papers / "node_feat.npy", small.features)
    np.save(papers / "node_label.npy", unlabelled(labels))
    cites = folder / "processed" / "paper___cites___paper"
    cites.mkdir()
    np.save(cites / "edge_index.npy", np.stack([small.sources, small.targets]))
    kept = {name: torch.from_numpy(own) if tensors else own for name, own in parts.items()}
    torch.save(kept, folder / "split_dict.pt")
    return Small(folder, small.sources, small.targets, small.features, labels)


def igb(folder: Path, raw: bool = False) -> Small:
    small = drawn(folder, 1024, np.float32, 19)
    papers = folder / "processed" / "paper"
    papers.mkdir(parents=True)
    labels = np.abs(small.labels).astype(np.float32)  # all have one
    for name, array in (("node_feat", small.features), ("node_label_19", labels)):
        if raw:
            array.tofile(papers / f"{name}.npy")
        else:
            np.save(papers / f"{name}.npy", array)
    cites = folder / "processed" / "paper__cites__paper"
    cites.mkdir()
    np.save(cites / "edge_index.npy", np.stack([small.sources, small.targets], axis=1))
    return Small(folder, small.sources, small.targets, small.features, labels.astype(int))


def friendster(folder: Path) -> Small:
    """The numbers of its nodes have gaps: node n is 101 + 7·n."""
    small = drawn(folder, 1, np.float32, 2)
    folder.mkdir()
    lines = "".join(
        f"{101 + 7 * a}\t{101 + 7 * b}\n" for a, b in zip(small.sources, small.targets, strict=True)
    )
    with gzip.open(folder / "com-friendster.ungraph.txt.gz", "wt") as file:
        file.write("# Undirected graph\n# FromNodeId\tToNodeId\n" + lines)
    return small
