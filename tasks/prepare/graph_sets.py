"""The public graphs as they are published, for `tasks.prepare.graph`.

Where the layouts are from (nothing of the code is taken over):

- ogbn-papers100M: OGB (github.com/snap-stanford/ogb, 61e9784), ogb/io/read_graph_raw.py
  (`read_binary_graph_raw`: the arrays of raw/data.npz) and ogb/nodeproppred/dataset.py
  (raw/node-label.npz with node_label, split/time/{train,valid,test}.csv.gz). master.csv has
  add_inverse_edge=False, so OGB's loader leaves edges directed; its example sgc.py makes them
  undirected (`to_undirected`, which drops those that recur), as is done here.
- MAG240M: the same repository, ogb/lsc/mag240m.py (processed/paper/node_feat.npy and
  node_label.npy, processed/paper___cites___paper/edge_index.npy, split_dict.pt). Its example
  examples/lsc/mag240m/gnn.py takes papers and citations alone and makes these symmetric, as is done
  here. Labels of the test papers are not published.
- com-friendster: snap.stanford.edu/data/com-Friendster.html. An undirected edge a line, two numbers
  of nodes; lines that begin with # are comments. The numbers have gaps and are closed up here.
- IGB: github.com/IllinoisGraphBenchmark/IGB-Datasets (fc36357), igb/dataloader.py
  (processed/paper/{node_feat,node_label_19}.npy, processed/paper__cites__paper/edge_index.npy with
  a row for each edge, whose second node gets the message of the first; `large` and `full` are
  mapped as raw float32, without the head of a .npy file). Edges stay directed and may recur. The
  loader replaces self-loops with one for every node; here they are dropped, since models see a node
  itself anyway. It splits `full` by position, 60 %, 20 % and 20 % of the first 227,130,858 papers,
  which are the labelled ones, and the others at random without a seed; here all are split by
  position.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from co2.errors import ConfigError, first_line, require
from tasks.graph.arrays import Stored, stored
from tasks.graph.edges import Edges
from tasks.graph.folder import LABEL, PARTS
from tasks.graph.generated import blurred, drawn_parts
from tasks.shared.progress import progress

_IGB_LABELLED = 227_130_858
_IGB_FEATURES = 1024
FRIENDSTER = "com-friendster.ungraph.txt.gz"
_LINES = 1 << 20
_TORN = EOFError, OSError, zlib.error, ValueError


@dataclass(frozen=True)
class Source:
    """A graph that can be read, in pieces where it is large."""

    num_nodes: int
    num_edges: int
    """As published: of an undirected graph, each is counted once."""
    edges: Callable[[int], Iterator[Edges]]
    """Yields pieces of so many edges."""
    undirected: bool
    distinct: bool
    num_features: int
    dtype: np.dtype
    rows: Callable[[int], Iterator[np.ndarray]]
    """Yields features, in pieces of so many bytes."""
    labels: np.ndarray
    """int16 [nodes]; -1 for none."""
    num_classes: int
    parts: dict[str, np.ndarray]
    origin: dict[str, object]
    """Entries of graph.json."""


def papers100m(folder: Path) -> Source:
    """See the module. `folder` is OGB's papers100M-bin.

    Raises:
        ConfigError: a file is missing, damaged or does not fit the others.
    """
    data = folder / "raw" / "data.npz"
    counts = stored(data, "num_nodes_list")
    _fits(counts, (1,))
    num_nodes = int(next(counts.pieces(1))[0])
    features, edges = stored(data, "node_feat"), stored(data, "edge_index")
    _fits(features, (num_nodes, None))
    _fits(edges, (2, None), "iu")
    written = stored(folder / "raw" / "node-label.npz", "node_label")
    labels = _labels(written, num_nodes, 172)
    split = folder / "split" / "time"
    files = {"train": "train.csv.gz", "val": "valid.csv.gz", "test": "test.csv.gz"}
    parts = {
        name: _part(split / file, _numbers(split / file), labels) for name, file in files.items()
    }
    return _citations(edges, features, labels, 172, parts, {"source": "ogbn-papers100M"})


def mag240m(folder: Path) -> Source:
    """See the module. `folder` is OGB-LSC's mag240m_kddcup2021.

    Raises:
        ConfigError: a file is missing, damaged or does not fit the others.
    """
    papers = folder / "processed" / "paper"
    features = stored(papers / "node_feat.npy")
    edges = stored(folder / "processed" / "paper___cites___paper" / "edge_index.npy")
    _fits(features, (None, None))
    _fits(edges, (2, None), "iu")
    labels = _labels(stored(papers / "node_label.npy"), features.shape[0], 153)
    path = folder / "split_dict.pt"
    split = _split_dict(path)
    parts = {
        "train": _part(path, split["train"], labels),
        "val": _part(path, split["valid"], labels),
        "test": np.empty(0, np.int64),
    }
    origin: dict[str, object] = {"source": "MAG240M", "test": "labels are not published"}
    return _citations(edges, features, labels, 153, parts, origin)


def igb(folder: Path, name: str) -> Source:
    """See the module. `folder` is that of one size, which holds processed/.

    Raises:
        ConfigError: a file is missing, damaged or does not fit the others.
    """
    papers = folder / "processed" / "paper"
    features = stored(papers / "node_feat.npy", raw=(_IGB_FEATURES,))
    edges = stored(folder / "processed" / "paper__cites__paper" / "edge_index.npy")
    _fits(features, (None, None))
    _fits(edges, (None, 2), "iu")
    num_nodes = features.shape[0]
    labelled = _IGB_LABELLED if name == "igb-full" else num_nodes
    labels = _labels(stored(papers / "node_label_19.npy", raw=()), num_nodes, 19, labelled)
    labelled = min(labelled, num_nodes)
    bounds = 0, int(labelled * 0.6), int(labelled * 0.6) + int(labelled * 0.2), labelled
    parts = {
        part: np.flatnonzero(labels[low:high] >= 0) + low
        for part, low, high in zip(PARTS, bounds, bounds[1:], strict=False)
    }
    return Source(
        num_nodes=num_nodes,
        num_edges=edges.shape[0],
        edges=lambda count: edges.pairs(1, count),
        undirected=False,
        distinct=False,
        num_features=features.shape[1],
        dtype=_kind(features),
        rows=features.rows,
        labels=labels,
        num_classes=19,
        parts=parts,
        origin={"source": "IGB260M, homogeneous", "split": "by position"},
    )


def friendster(folder: Path, scratch: Path, features: int, classes: int, seed: int) -> Source:
    """See the module. Features and labels are drawn, and tell nothing of the graph.

    Args:
        folder: holds `FRIENDSTER`.
        scratch: an empty folder, for 8 bytes an edge; the source is read from there.
        features: of a node.
        classes: of the nodes in train, val and test.
        seed: of what is drawn.
    Raises:
        ConfigError: the file is missing or damaged.
    """
    path = folder / FRIENDSTER
    require(path.is_file(), "--source", folder, f"does not hold {FRIENDSTER}")
    pairs, there = scratch / "pairs", np.zeros(0, bool)
    num_edges = 0
    with pairs.open("wb") as file, progress(f"reading {path}", path.stat().st_size):
        for piece in _lines(path):
            file.write(np.ascontiguousarray(piece, np.uint32).data)  # pandas keeps columns
            num_edges += len(piece)
            most = int(piece.max()) + 1
            if most > len(there):
                there = np.concatenate([there, np.zeros(most - len(there), bool)])
            there[piece.ravel()] = True
    require(num_edges > 0, "--source", folder, f"{FRIENDSTER} holds no edge")
    number = np.cumsum(there, dtype=np.int32) - 1  # int32 halves what is large here
    num_nodes = int(number[-1]) + 1
    hint = f"{FRIENDSTER} has {num_nodes} nodes, fewer than 4 a class; give fewer --classes"
    require(num_nodes >= 4 * classes, "--source", folder, hint)
    of = np.random.default_rng((seed, 5)).integers(classes, size=num_nodes).astype(LABEL)
    parts = drawn_parts(num_nodes, seed)
    labels = np.full(num_nodes, -1, LABEL)
    for own in parts.values():
        labels[own] = of[own]

    def edges(count: int) -> Iterator[Edges]:
        with pairs.open("rb") as file:
            while len(ends := np.fromfile(file, np.uint32, 2 * count)):
                yield number[ends[::2]], number[ends[1::2]]

    return Source(
        num_nodes=num_nodes,
        num_edges=num_edges,
        edges=edges,
        undirected=True,
        distinct=True,
        num_features=features,
        dtype=np.dtype(np.float32),
        rows=lambda _: blurred(of, classes, features, seed),
        labels=labels,
        num_classes=classes,
        parts=parts,
        origin={
            "source": "com-friendster",
            "drawn": {"features": features, "labels": classes, "seed": seed},
        },
    )


def _citations(
    edges: Stored,
    features: Stored,
    labels: np.ndarray,
    num_classes: int,
    parts: dict[str, np.ndarray],
    origin: dict[str, object],
) -> Source:
    return Source(
        num_nodes=features.shape[0],
        num_edges=edges.shape[1],
        edges=lambda count: edges.pairs(0, count),
        undirected=True,
        distinct=True,
        num_features=features.shape[1],
        dtype=_kind(features),
        rows=features.rows,
        labels=labels,
        num_classes=num_classes,
        parts=parts,
        origin=origin,
    )


def _fits(array: Stored, shape: tuple[int | None, ...], kinds: str = "fiu") -> None:
    """Refuse an array of another shape, None being any length, or of another kind of number."""
    known = zip(array.shape, shape, strict=False)
    fits = len(array.shape) == len(shape) and all(b is None or a == b for a, b in known)
    hint = f"{array.name} has the shape {array.shape}, {shape} is expected"
    require(fits, "--source", array.path.parent, hint.replace("None", "any"))
    hint = f"{array.name} holds {array.dtype}; whole numbers are needed"
    require(array.dtype.kind in kinds, "--source", array.path.parent, hint)


def _kind(features: Stored) -> np.dtype:
    """The type of features, as they are kept."""
    hint = f"{features.name} holds {features.dtype}; float16 or float32 is needed"
    kinds = np.dtype(np.float16), np.dtype(np.float32)
    require(features.dtype in kinds, "--source", features.path.parent, hint)
    return features.dtype


def _labels(
    array: Stored, num_nodes: int, num_classes: int, labelled: int | None = None
) -> np.ndarray:
    """The labels of all nodes, int16; NaN and negative ones are none, and so are those of nodes
    from `labelled` on. The array may end there."""
    values = array.shape[0]
    hint = f"{array.name} has {values} labels, there are {num_nodes} nodes"
    fits = values == num_nodes or (labelled is not None and labelled <= values < num_nodes)
    require(fits and array.shape in ((values,), (values, 1)), "--source", array.path.parent, hint)
    labels, at = np.full(num_nodes, -1, LABEL), 0
    for piece in array.pieces(_LINES):
        piece = piece[: max(0, (num_nodes if labelled is None else labelled) - at)]
        named = piece[piece >= 0]  # neither NaN nor negative
        wrong = named[(named >= num_classes) | (named != np.floor(named))]
        if len(wrong):
            hint = f"{array.name} has the label {wrong[0]:g}, classes are 0 to {num_classes - 1}"
            raise ConfigError("--source", array.path.parent, hint)
        labels[at : at + len(piece)][piece >= 0] = named
        at += len(piece)
    return labels


def _part(path: Path, nodes: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The nodes of a part, ascending; `path` is where they are from."""
    nodes = np.unique(nodes.astype(np.int64))
    within = not len(nodes) or (nodes[0] >= 0 and nodes[-1] < len(labels))
    hint = f"{path.name} names nodes outside of 0 to {len(labels) - 1}"
    require(within, "--source", path.parent, hint)
    hint = f"{path.name} names nodes without a label"
    require(bool((labels[nodes] >= 0).all()), "--source", path.parent, hint)
    return nodes


def _numbers(path: Path) -> np.ndarray:
    """The numbers of a .csv.gz file, one a line."""
    import pandas

    require(path.is_file(), "--source", path.parent, f"does not hold {path.name}")
    try:
        return pandas.read_csv(path, header=None, dtype=np.int64)[0].to_numpy()
    except _TORN as error:
        raise _torn(path, error) from None


def _lines(path: Path) -> Iterator[np.ndarray]:
    """The pairs of numbers of a text file, int64 [piece, 2]."""
    import pandas

    try:
        reader = pandas.read_csv(
            path, sep="\t", comment="#", header=None, dtype=np.int64, chunksize=_LINES
        )
        with reader:
            for frame in reader:
                piece = frame.to_numpy()
                if piece.shape[1] != 2 or piece.min() < 0 or piece.max() >= 2**31:
                    raise ValueError("a line is no pair of numbers of nodes")
                yield piece
    except _TORN as error:
        raise _torn(path, error) from None


def _split_dict(path: Path) -> dict[str, np.ndarray]:
    """The parts of MAG240M, arrays or tensors, which torch.save wrote. Only such are unpickled."""
    import torch

    require(path.is_file(), "--source", path.parent, f"does not hold {path.name}")
    rebuild = np._core.multiarray._reconstruct  # type: ignore[attr-defined]
    # torch takes classes, and functions with the name that a pickle has for them.
    allowed: list[Any] = [
        *((rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
        np.ndarray,
        np.dtype,
        *(type(np.dtype(kind)) for kind in (np.int32, np.int64)),
    ]
    try:
        with torch.serialization.safe_globals(allowed):
            found = torch.load(path, weights_only=True)
        parts = {name: np.asarray(found[name]) for name in ("train", "valid")}
        whole = all(own.ndim == 1 and own.dtype.kind in "iu" for own in parts.values())
    except Exception as error:  # torch.load raises whatever the file makes it raise
        hint = f"{path.name} is no dictionary of arrays by torch.save ({type(error).__name__})"
        raise ConfigError("--source", path.parent, hint) from None
    hint = f"{path.name} has parts that are no lists of nodes"
    require(whole, "--source", path.parent, hint)
    return parts


def _torn(path: Path, error: Exception) -> ConfigError:
    return ConfigError("--source", path.parent, f"{path.name} is damaged ({first_line(error)})")
