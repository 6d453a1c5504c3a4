"""A graph on disk: a folder that appears whole or not at all.

    graph.json                     written last: format, counts, types, checksums, origin
    starts.bin                     int64 [nodes + 1]: where each node's neighbours begin
    neighbours.bin                 int32 or int64 [edges]
    features.bin                   float16 or float32 [nodes, features], row n of node n
    labels.bin                     int16 [nodes]; -1 for none
    train.bin, val.bin, test.bin   int64, ascending: the labelled nodes of each part

An edge leads to a node from each neighbour whose features it sees. For a citation graph that is
made undirected, both directions are there.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from co2.atomic import refuse_others, to_disk, written_aside
from tasks.shared.progress import progress

FORMAT = 1
"""Version of the layout. Folders of others are not used."""
PARTS = ("train", "val", "test")
LABEL = np.dtype(np.int16)
_PIECE = 1 << 24
"""Bytes that are read at once."""
_FEATURES = ("float16", "float32")
_FILES = {"graph.json", *(f"{name}.bin" for name in ("starts", "neighbours", "features", "labels"))}
_FILES |= {f"{part}.bin" for part in PARTS}


@dataclass(frozen=True)
class GraphFolder:
    """An open graph whose files have the sizes that graph.json says."""

    folder: Path
    meta: dict[str, Any]
    """The content of graph.json. `Any`, because it is JSON."""

    @property
    def num_nodes(self) -> int:
        return int(self.meta["nodes"])

    @property
    def num_edges(self) -> int:
        return int(self.meta["edges"])

    @property
    def num_features(self) -> int:
        return int(self.meta["features"])

    @property
    def num_classes(self) -> int:
        return int(self.meta["classes"])

    @property
    def dtype(self) -> np.dtype:
        """Of a feature."""
        return np.dtype(self.meta["types"]["features"])

    @property
    def row_bytes(self) -> int:
        """Of a node's features."""
        return self.num_features * self.dtype.itemsize

    @property
    def features_bytes(self) -> int:
        """Of all nodes."""
        return self.num_nodes * self.row_bytes

    @property
    def features_path(self) -> Path:
        return self.folder / "features.bin"

    def features(self) -> np.ndarray:
        """[nodes, features], mapped from disk and read-only."""
        shape = self.num_nodes, self.num_features
        return np.memmap(self.features_path, self.dtype, mode="r", shape=shape)

    def starts(self) -> np.ndarray:
        """int64 [nodes + 1], mapped."""
        return self._mapped("starts", np.int64)

    def neighbours(self) -> np.ndarray:
        """int32 or int64 [edges], mapped."""
        return self._mapped("neighbours", self.meta["types"]["neighbours"])

    def labels(self) -> np.ndarray:
        """int16 [nodes], mapped."""
        return self._mapped("labels", LABEL)

    def part(self, name: str) -> np.ndarray:
        """The labelled nodes of "train", "val" or "test", int64, mapped."""
        return self._mapped(name, np.int64)

    def _mapped(self, name: str, dtype: Any) -> np.ndarray:
        path = self.folder / f"{name}.bin"
        if path.stat().st_size == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.memmap(path, dtype, mode="r")


def open_graph(folder: Path) -> GraphFolder | None:
    """Open the graph in `folder`; None where there is none or it is damaged. Only graph.json is
    read. Damage is a missing file, or a size other than graph.json says."""
    try:
        meta = json.loads((folder / "graph.json").read_text())
        graph = GraphFolder(folder, meta)
        if meta["format"] != FORMAT or meta["types"]["features"] not in _FEATURES:
            return None
        if meta["types"]["neighbours"] not in ("int32", "int64"):
            return None
        sizes = {f"{name}.bin": int(size) for name, size in expected_bytes(graph).items()}
        found = {name: (folder / name).stat().st_size for name in sizes}
        return graph if found == sizes else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def expected_bytes(graph: GraphFolder) -> dict[str, int]:
    """The size of each file, by its name without ".bin"."""
    meta = graph.meta
    width = np.dtype(meta["types"]["neighbours"]).itemsize
    return {
        "starts": (graph.num_nodes + 1) * 8,
        "neighbours": graph.num_edges * width,
        "features": graph.features_bytes,
        "labels": graph.num_nodes * LABEL.itemsize,
        **{part: int(meta["parts"][part]) * 8 for part in PARTS},
    }


def neighbour_type(num_nodes: int) -> np.dtype:
    """The narrowest type that holds a node's number."""
    return np.dtype(np.int32 if num_nodes < 2**31 else np.int64)


def create(
    folder: Path,
    fill: Callable[[Path], Mapping[str, object]],
    origin: Mapping[str, object],
) -> GraphFolder:
    """Make a graph aside and move it to `folder`, where it replaces a damaged one.

    Args:
        folder: place of the graph. The caller holds `co2.atomic.locked(folder)`.
        fill: writes all files but graph.json into the folder that it is given, and returns
            "nodes", "edges", "features", "classes", "parts" ({"train": …, "val": …, "test": …},
            counts) and "types" ({"features": …, "neighbours": …}, names of NumPy's types).
        origin: further entries of graph.json: "name" and where the data come from.
    Returns:
        The new graph, opened.
    Raises:
        OSError: the folder cannot be written, or holds other files.
    """
    refuse_others(folder, _FILES)
    with written_aside(folder, lambda: open_graph(folder) is not None) as aside:
        meta = {"format": FORMAT, **origin, **fill(aside)}
        names = sorted(path.name for path in aside.iterdir())
        meta["sha256"] = {name: _sha256(aside / name) for name in names}
        with (aside / "graph.json").open("w", encoding="utf-8") as file:
            file.write(json.dumps(meta, indent=2) + "\n")
            to_disk(file)
    graph = open_graph(folder)
    assert graph is not None, f"{folder} does not have what its graph.json says"
    return graph


def write_array(path: Path, pieces: Iterable[np.ndarray], dtype: Any) -> int:
    """Write an array piece by piece, and flush it to the disk. Returns its length."""
    rows = 0
    with path.open("wb") as file:
        for piece in pieces:
            file.write(np.ascontiguousarray(piece, dtype).data)
            rows += len(piece)
        to_disk(file)
    return rows


def faults(folder: Path) -> Iterator[str]:
    """Yield what is wrong with a graph, one line each. Unlike `open_graph`, it reads everything."""
    if not (folder / "graph.json").is_file():
        yield f"{folder / 'graph.json'}: is missing"
        return
    graph = open_graph(folder)
    if graph is None:
        yield f"{folder}: graph.json does not fit the files beside it; prepare it again"
        return
    for name, sha256 in graph.meta["sha256"].items():
        if not (folder / name).is_file():
            yield f"{folder / name}: is missing"
        elif _sha256(folder / name) != sha256:
            yield f"{folder / name}: its checksum is not that of graph.json"
    yield from _content(graph)


def _content(graph: GraphFolder) -> Iterator[str]:
    """What the arrays say that no graph can have."""
    folder, nodes = graph.folder, graph.num_nodes
    starts = graph.starts()
    if starts[0] != 0 or starts[-1] != graph.num_edges or (np.diff(starts) < 0).any():
        yield f"{folder / 'starts.bin'}: does not rise from 0 to {graph.num_edges} edges"
    if not _within(graph.neighbours(), 0, nodes):
        yield f"{folder / 'neighbours.bin'}: names nodes outside of 0 to {nodes - 1}"
    labels = graph.labels()
    if not _within(labels, -1, graph.num_classes):
        yield f"{folder / 'labels.bin'}: has labels outside of -1 to {graph.num_classes - 1}"
    for part in PARTS:
        own = graph.part(part)
        path = folder / f"{part}.bin"
        if not _within(own, 0, nodes):
            yield f"{path}: names nodes outside of 0 to {nodes - 1}"
        elif (np.diff(own) <= 0).any():
            yield f"{path}: its nodes do not ascend"
        elif (labels[own] < 0).any():
            yield f"{path}: has nodes without a label"


def _within(values: np.ndarray, low: int, high: int) -> bool:
    """Whether all values are from `low` to `high` - 1."""
    step = max(1, _PIECE // values.itemsize)
    pieces = (values[at : at + step] for at in range(0, len(values), step))
    return all(piece.min() >= low and piece.max() < high for piece in pieces)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file, progress(f"reading {path}", path.stat().st_size) as advance:
        while piece := file.read(_PIECE):
            digest.update(piece)
            advance(len(piece))
    return digest.hexdigest()
