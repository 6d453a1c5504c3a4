"""Writes public graphs, or one by rule, in the layout of `tasks.graph.folder`, for graph.

The folder is made aside and renamed, so a run that is stopped leaves nothing, and the same command
starts again. Memory is bounded by an option, but for a few numbers a node; edges are sorted out of
core (`tasks.graph.edges`), and features go from file to file in pieces.
"""

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from co2.atomic import locked
from co2.errors import ConfigError, require, require_count
from tasks.graph.edges import Edges, write_rows
from tasks.graph.folder import (
    LABEL,
    GraphFolder,
    create,
    faults,
    neighbour_type,
    open_graph,
    write_array,
)
from tasks.graph.generated import generate
from tasks.graph.public import IGB, KNOWN
from tasks.prepare.graph_sets import Source, friendster, igb, mag240m, papers100m
from tasks.shared.progress import progress

_BYTES_OF_AN_EDGE = 128
"""While a piece of edges is read, checked and spilled."""
_PIECES = 16
"""A piece of features has one in so many of the bytes that --memory gives."""

PUBLISHED = {
    "papers100m": "OGB's papers100M-bin, from https://ogb.stanford.edu/docs/nodeprop",
    "mag240m": "OGB-LSC's mag240m_kddcup2021, from https://ogb.stanford.edu/docs/lsc/mag240m",
    "friendster": "https://snap.stanford.edu/data/com-Friendster.html has the file",
    **dict.fromkeys(IGB, "that of the size, from github.com/IllinoisGraphBenchmark/IGB-Datasets"),
}
"""What --source must be, and where it is from."""

HELP = f"""\
Graphs for task=graph: node classification, with features that may be larger than memory.

  --set papers100m   ogbn-papers100M: 111 M papers, 1.6 G citations, 128 float32: 57 GB, 14 GB
                     FOLDER: OGB's papers100M-bin (raw/, split/)
  --set mag240m      the papers of MAG240M: 122 M, 1.3 G citations, 768 float16: 187 GB, 11 GB
                     FOLDER: OGB-LSC's mag240m_kddcup2021 (processed/, split_dict.pt)
  --set friendster   com-friendster: 66 M users, 1.8 G friendships: 34 GB, 15 GB;
                     features and labels are drawn, and tell nothing of the graph
                     FOLDER: holds com-friendster.ungraph.txt.gz
  --set {"|".join(IGB)}
                     IGB, homogeneous: 100 k to 269 M papers, 1024 float32: 0.4 GB to 1.1 TB
                     FOLDER: that of the size (processed/)
  --set generated    a graph by rule: --nodes, --degree, --features, --classes, --seed, --dtype
The first size is that of the features, the second that of the edges.
  python -m tasks.prepare graph --set NAME --source FOLDER
makes of them
  <root>/graphs/<NAME>/{{graph.json,starts.bin,neighbours.bin,features.bin,labels.bin}}
  <root>/graphs/<NAME>/{{train,val,test}}.bin
While it runs, edges take 8 bytes more on the disk for each way that they lead. When it is
stopped it leaves nothing, and the same command starts again. Licences: docs/data.md."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """See `DataSet.arguments`."""
    names = [*KNOWN, "generated"]
    parser.add_argument("--set", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--source", metavar="FOLDER", help="the set as it is published")
    parser.add_argument("--memory", type=float, default=2.0, metavar="GB", help="default: 2")
    drawn = parser.add_argument_group("what is drawn, for generated and friendster")
    drawn.add_argument("--features", type=int, default=128, help="of a node")
    drawn.add_argument("--classes", type=int, default=32)
    drawn.add_argument("--seed", type=int, default=0)
    rule = parser.add_argument_group("for generated")
    rule.add_argument("--nodes", type=int, default=1_000_000)
    rule.add_argument("--degree", type=int, default=15, help="mean number of neighbours")
    rule.add_argument("--dtype", default="float32", help="of the features: float32 or float16")


def run(options: argparse.Namespace) -> str:
    """See `DataSet.run`."""
    names = ", ".join([*KNOWN, "generated"])
    require(options.set is not None, "--set", "", f"name a graph: {names}")
    require(0 < options.memory < 1 << 20, "--memory", options.memory, "must be above 0, in GB")
    final = Path(options.root) / "graphs" / options.set
    try:
        graph = _generated(final, options) if options.set == "generated" else _read(final, options)
    except FileExistsError as error:
        hint = f"{error.filename or final} {error.strerror}; move it or choose another folder"
        raise ConfigError("--root", options.root, hint) from None
    except OSError as error:
        what = f"{error.filename or final}: {error.strerror or error}"
        raise ConfigError("--root", options.root, f"{what}; make room or choose another") from None
    counts = f"{graph.num_nodes:,} nodes, {graph.num_edges:,} edges"
    return f"{final}: {counts}; train with: task=graph graph.dataset={options.set}"


def check(path: Path, options: argparse.Namespace) -> Iterator[str]:
    """See `DataSet.check`. Reads all files, and compares the counts of the public sets."""
    yield from faults(path)
    graph = open_graph(path)
    if graph is None:
        return
    meta = graph.meta
    held = {**meta, **meta["parts"]}
    for what, number in KNOWN.get(str(meta.get("name")), {}).items():
        if held.get(what) != number:
            yield f"{path}: {what} is {held.get(what)}, {meta['name']} has {number}"


def verify(path: Path) -> Iterator[str]:
    """See `DataSet.verify`. Reads all files."""
    return faults(path)


def _generated(final: Path, options: argparse.Namespace) -> GraphFolder:
    require(options.source is None, "--source", options.source, "generated has none; leave it out")
    try:
        return generate(
            final,
            options.nodes,
            options.features,
            options.classes,
            options.degree,
            options.seed,
            options.dtype,
        )
    except ConfigError as error:
        raise ConfigError(f"--{error.key}", error.value, error.hint) from None


def _read(final: Path, options: argparse.Namespace) -> GraphFolder:
    with locked(final):
        graph = open_graph(final)
        if graph is not None:
            return graph
        hint = f"give the folder of {options.set}: {PUBLISHED[options.set]}"
        require(options.source is not None, "--source", "", hint)
        folder = Path(options.source)
        require(folder.is_dir(), "--source", folder, f"no such folder; {hint}")
        # `fill` knows the origin; graph.json is written after it.
        origin: dict[str, object] = {"name": options.set}

        def fill(aside: Path) -> dict[str, object]:
            scratch = aside / "scratch"
            scratch.mkdir()
            try:
                source = _source(folder, scratch, options)
            except ConfigError as error:
                more = f"; {hint}" if error.key == "--source" else ""
                raise ConfigError(error.key, error.value, f"{error.hint}{more}") from None
            origin.update(source.origin)
            memory = int(options.memory * 2**30)
            try:
                meta = _fill(aside, source, memory)
            except ValueError as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError("--source", folder, str(error)) from None
            shutil.rmtree(scratch)
            return {**origin, **meta}

        return create(final, fill, {})


def _source(folder: Path, scratch: Path, options: argparse.Namespace) -> Source:
    if options.set == "papers100m":
        return papers100m(folder)
    if options.set == "mag240m":
        return mag240m(folder)
    if options.set in IGB:
        return igb(folder, options.set)
    require_count("--features", options.features)
    require(1 < options.classes < 2**15, "--classes", options.classes, "must be 2 to 32767")
    require(options.seed >= 0, "--seed", options.seed, "must be 0 or more")
    return friendster(folder, scratch, options.features, options.classes, options.seed)


def _fill(folder: Path, source: Source, memory: int) -> dict[str, object]:
    """Write a graph; see `tasks.graph.folder.create`."""
    with progress(f"sorting {source.num_edges:,} edges", source.num_edges) as advance:

        def counted() -> Iterator[Edges]:
            for ends in source.edges(max(1, memory // _BYTES_OF_AN_EDGE)):
                yield ends
                advance(len(ends[0]))

        num_edges = write_rows(
            folder,
            counted(),
            source.num_nodes,
            undirected=source.undirected,
            distinct=source.distinct,
            memory=memory,
        )
    with progress("copying features", source.num_nodes) as advance:

        def rows() -> Iterator[np.ndarray]:
            for piece in source.rows(max(1, memory // _PIECES)):
                yield piece
                advance(len(piece))

        written = write_array(folder / "features.bin", rows(), source.dtype)
    assert written == source.num_nodes, "features of other nodes"
    write_array(folder / "labels.bin", [source.labels], LABEL)
    for part, nodes in source.parts.items():
        write_array(folder / f"{part}.bin", [nodes], np.int64)
    return {
        "nodes": source.num_nodes,
        "edges": num_edges,
        "published_edges": source.num_edges,
        "undirected": source.undirected,
        "features": source.num_features,
        "classes": source.num_classes,
        "parts": {part: len(nodes) for part, nodes in source.parts.items()},
        "types": {
            "features": source.dtype.name,
            "neighbours": neighbour_type(source.num_nodes).name,
        },
    }
