"""Public graphs out of their own layouts: equal to brute force, torn ones refused, counts known."""

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import ClassVar

import numpy as np
import pytest
import torch

from tasks.graph.folder import GraphFolder, faults, open_graph
from tasks.prepare import graph as prepare
from tasks.prepare import graph_sets
from tasks.prepare.__main__ import main
from tests.tasks.conftest import Refused
from tests.tasks.small_sets import NODES, SmallGraph, friendster, igb, mag240m, papers100m
from tests.tasks.test_graph import brute, written

MEMORY = ["--memory", str(2000 / 2**30)]
"""Some 2000 bytes, which force many buckets."""


def words(root: Path, name: str, *arguments: object) -> list[str]:
    return ["graph", "--root", str(root), "--set", name, *map(str, arguments)]


def made(root: Path, name: str, source: Path, *arguments: object) -> GraphFolder:
    assert main(words(root, name, "--source", source, *MEMORY, *arguments)) == 0
    graph = open_graph(root / "graphs" / name)
    assert graph is not None and not list(faults(graph.folder))
    assert [path.name for path in (root / "graphs").iterdir()] == [name]
    return graph


def same_rows(graph: GraphFolder, small: SmallGraph, undirected: bool, distinct: bool) -> None:
    expected = brute(small.sources, small.targets, graph.num_nodes, undirected, distinct)
    assert written(graph.folder, graph.num_nodes) == expected


SOURCES = {
    "papers100m": papers100m,
    "papers100m compressed": partial(papers100m, compressed=True),
    "papers100m by columns": partial(papers100m, by_columns=True),
    "mag240m": mag240m,
    "mag240m of tensors": partial(mag240m, tensors=True),
    "igb-tiny": igb,
    "igb-large": partial(igb, raw=True),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_becomes_a_graph(tmp_path: Path, kind: str) -> None:
    name, small = kind.split()[0], SOURCES[kind](tmp_path / "source")
    graph = made(tmp_path / "data", name, small.folder)
    citations = not name.startswith("igb")
    same_rows(graph, small, undirected=citations, distinct=citations)
    assert graph.dtype == small.features.dtype and (graph.features() == small.features).all()
    assert (graph.labels() == small.labels).all()
    assert graph.num_classes == {"papers100m": 172, "mag240m": 153}.get(name, 19)
    for part, nodes in small.parts.items():
        assert graph.part(part).tolist() == sorted(nodes)
    assert ("not published" in graph.meta.get("test", "")) == (name == "mag240m")
    assert graph.meta["published_edges"] == 300


def test_friendster_becomes_a_graph(tmp_path: Path) -> None:
    small = friendster(tmp_path / "snap")
    drawn = ["--features", 5, "--classes", 3, "--seed", 1]
    graph = made(tmp_path / "data", "friendster", small.folder, *drawn)
    assert set(small.sources) | set(small.targets) == set(range(NODES))
    same_rows(graph, small, undirected=True, distinct=True)
    assert graph.features().shape == (NODES, 5) and graph.num_classes == 3
    assert graph.meta["drawn"] == {"features": 5, "labels": 3, "seed": 1}
    assert graph.meta["parts"] == {"train": 4, "val": 1, "test": 1}
    again = made(tmp_path / "again", "friendster", small.folder, *drawn)
    assert again.meta == graph.meta


def test_a_changed_byte(tmp_path: Path, refused: Refused) -> None:
    """The archive's own checksum of the features tells it."""
    small = papers100m(tmp_path / "bin")
    path = small.folder / "raw" / "data.npz"
    data = bytearray(path.read_bytes())
    at = data.index(small.features.tobytes())
    data[at + 100] ^= 1
    path.write_bytes(data)
    line = refused(words(tmp_path / "data", "papers100m", "--source", small.folder))
    assert "data.npz is damaged (Bad CRC-32" in line
    assert not list((tmp_path / "data" / "graphs").iterdir())


def test_arrays_of_an_older_numpy(tmp_path: Path) -> None:
    small = mag240m(tmp_path / "mag")
    first = made(tmp_path / "first", "mag240m", small.folder)
    path = small.folder / "split_dict.pt"
    parts = torch.load(path, weights_only=False)

    class Old(pickle._Pickler):
        """Names NumPy's module as NumPy 1 does, with which the set was written."""

        def save_global(self, obj, name=None):
            if getattr(obj, "__name__", "") == "_reconstruct":
                self.write(b"cnumpy.core.multiarray\n_reconstruct\n")
                self.memoize(obj)
            else:
                super().save_global(obj, name)

        dispatch: ClassVar = {**pickle._Pickler.dispatch, FunctionType: save_global}

    old = type("old", (), {**vars(pickle), "Pickler": Old})
    torch.save(parts, path, pickle_module=old)
    assert b"numpy.core.multiarray" in path.read_bytes()
    assert made(tmp_path / "again", "mag240m", small.folder).meta == first.meta


def test_a_pickle_that_does_something_is_not_read(tmp_path: Path, refused: Refused) -> None:
    small = mag240m(tmp_path / "mag")

    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "evil",)

    torch.save({"train": Evil()}, small.folder / "split_dict.pt")
    line = refused(words(tmp_path / "data", "mag240m", "--source", small.folder))
    assert "split_dict.pt is no dictionary of arrays by torch.save" in line
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("short", [True, False])
def test_full_has_labels_up_to_a_node(tmp_path: Path, short: bool, monkeypatch) -> None:
    monkeypatch.setattr(graph_sets, "_IGB_LABELLED", 30)
    small = igb(tmp_path / "size", raw=True)
    path = small.folder / "processed" / "paper" / "node_label_19.npy"
    labels = np.fromfile(path, np.float32)
    labels[30:] = 77  # never read
    labels[: 30 if short else NODES].tofile(path)
    graph = made(tmp_path / "data", "igb-full", small.folder)
    assert (graph.labels()[:30] == small.labels[:30]).all()
    assert (graph.labels()[30:] == -1).all()
    assert [len(graph.part(part)) for part in ("train", "val", "test")] == [18, 6, 6]


def npy_with(value: float) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        array = np.load(path)
        array.flat[7] = value
        np.save(path, array)

    return change


def replaced(array: np.ndarray) -> Callable[[Path], None]:
    return lambda path: np.save(path, array)


def shorter(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def parted(nodes: object) -> Callable[[Path], None]:
    return lambda path: torch.save(dict.fromkeys(("train", "valid"), nodes), path)


CITES = "processed/paper___cites___paper/edge_index.npy"
FEATURES = "processed/paper/node_feat.npy"
LABELS = "processed/paper/node_label.npy"


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (CITES, npy_with(NODES), "an edge names node 40, the nodes are 0 to 39"),
        (CITES, replaced(np.zeros((3, 4), int)), "has the shape (3, 4), (2, any) is expected"),
        (CITES, shorter, "edge_index.npy is damaged (it ends too early)"),
        (FEATURES, replaced(np.zeros((NODES, 2))), "holds float64; float16 or float32"),
        (LABELS, npy_with(153), "has the label 153, classes are 0 to 152"),
        (LABELS, npy_with(1.5), "has the label 1.5, classes"),
        (LABELS, replaced(np.full(NODES, np.nan)), "split_dict.pt names nodes without a label"),
        ("split_dict.pt", parted(torch.zeros(0)), "has parts that are no lists of nodes"),
        ("split_dict.pt", parted(np.array([40])), "names nodes outside of 0 to 39"),
    ],
)
def test_a_source_in_one_line(
    tmp_path: Path, name: str, change: Callable[[Path], None], says: str, refused: Refused
) -> None:
    small = mag240m(tmp_path / "mag")
    change(small.folder / name)
    line = refused(words(tmp_path / "data", "mag240m", "--source", small.folder, *MEMORY))
    assert line.startswith(f"error: --source={small.folder}") and says in line
    assert not list((tmp_path / "data" / "graphs").iterdir())


def test_a_source_without_its_file(tmp_path: Path, refused: Refused) -> None:
    line = refused(words(tmp_path / "data", "friendster", "--source", tmp_path))
    assert f"--source={tmp_path}: does not hold {graph_sets.FRIENDSTER}; give the folder" in line


@pytest.mark.parametrize("memory", ["0", "-1", "nan", "2e6"])
def test_memory_that_no_machine_has(tmp_path: Path, memory: str, refused: Refused) -> None:
    line = refused(words(tmp_path, "mag240m", "--source", tmp_path, "--memory", memory))
    assert line == f"error: --memory={float(memory)}: must be above 0, in GB"


def test_another_rule(tmp_path: Path, refused: Refused) -> None:
    rule = words(tmp_path, "generated", "--nodes", 200, "--features", 4, "--classes", 4)
    assert main(rule) == 0
    assert "holds another graph; delete it first" in refused([*rule, "--seed", "1"])


def test_the_published_counts_add_up() -> None:
    """papers100M's labelled nodes are 1,546,782."""
    known = prepare.KNOWN["papers100m"]
    assert sum(known[part] for part in ("train", "val", "test")) == 1_546_782


def test_check_compares_with_the_published_counts(tmp_path: Path, capfd, monkeypatch) -> None:
    folder = made(tmp_path, "igb-tiny", igb(tmp_path / "size").folder).folder
    capfd.readouterr()
    assert main(["graph", "--check", str(folder)]) == 1
    counts = f"{folder}: nodes is 40, igb-tiny has 100000"
    assert capfd.readouterr().out.splitlines() == [counts, f"{folder}: 1 faults"]
    monkeypatch.setitem(prepare.KNOWN, "igb-tiny", {"nodes": 40, "train": 24})
    assert main(["graph", "--check", str(folder)]) == 0
    for name, dtype, place, value, says in (
        ("labels.bin", np.int16, 3, 19, "has labels outside of -1 to 18"),
        ("starts.bin", np.int64, 5, 1 << 40, "does not rise from 0"),
        ("neighbours.bin", np.int32, 0, -1, "names nodes outside of 0 to 39"),
        ("train.bin", np.int64, 0, 23, "its nodes do not ascend"),
    ):
        content = (folder / name).read_bytes()
        values = np.memmap(folder / name, dtype, mode="r+")
        values[place] = value
        values.flush()
        assert main(["graph", "--check", str(folder)]) == 1
        assert f"{folder}/{name}: {says}" in capfd.readouterr().out
        (folder / name).write_bytes(content)
