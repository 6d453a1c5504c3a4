"""Public graphs out of their own layouts: equal to brute force, torn ones refused, counts known."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import ClassVar

import numpy as np
import pytest
import torch

from tasks.graph import edges as rows_of
from tasks.graph.folder import GraphFolder, faults, open_graph
from tasks.prepare import graph as prepare
from tasks.prepare import graph_sets
from tasks.prepare.__main__ import main
from tests.tasks import small_graphs
from tests.tasks.small_graphs import NODES, Small
from tests.tasks.test_graph_data import brute, written

MEMORY = ["--memory", str(2000 / 2**30)]
"""Some 2000 bytes, which force many buckets."""


def run(root: Path, *arguments: object) -> int:
    return main(["graph", "--root", str(root), *map(str, arguments)])


def made(root: Path, name: str, source: Path, *arguments: object) -> GraphFolder:
    assert run(root, "--set", name, "--source", source, *MEMORY, *arguments) == 0
    graph = open_graph(root / "graphs" / name)
    assert graph is not None and not list(faults(graph.folder))
    assert [path.name for path in (root / "graphs").iterdir()] == [name]
    return graph


def told(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error."""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --")
    return line


def same_rows(graph: GraphFolder, small: Small, undirected: bool, distinct: bool) -> None:
    expected = brute(small.sources, small.targets, graph.num_nodes, undirected, distinct)
    assert written(graph.folder, graph.num_nodes) == expected


class TestPapers100M:
    @pytest.mark.parametrize("compressed", [True, False])
    @pytest.mark.parametrize("by_columns", [True, False])
    def test_becomes_a_graph(
        self, tmp_path: Path, compressed: bool, by_columns: bool, capsys
    ) -> None:
        small = small_graphs.papers100m(tmp_path / "bin", compressed, by_columns)
        graph = made(tmp_path / "data", "papers100m", small.folder)
        assert "train with: task=graph graph.dataset=papers100m" in capsys.readouterr().out
        same_rows(graph, small, undirected=True, distinct=True)
        assert graph.dtype == np.float32 and (graph.features() == small.features).all()
        assert (graph.labels() == small.labels).all() and graph.num_classes == 172
        for part, name in (("train", "train"), ("val", "valid"), ("test", "test")):
            assert graph.part(part).tolist() == sorted(small_graphs.split(small)[name])
        assert graph.meta["published_edges"] == 300

    def test_memory_changes_nothing(self, tmp_path: Path, monkeypatch) -> None:
        small = small_graphs.papers100m(tmp_path / "bin")
        buckets, split = [], rows_of._sorted_buckets

        def counted(*arguments):
            for bucket in split(*arguments):
                buckets.append(bucket)
                yield bucket

        monkeypatch.setattr(rows_of, "_sorted_buckets", counted)
        tight = made(tmp_path / "tight", "papers100m", small.folder)
        assert len(buckets) >= NODES
        wide = made(tmp_path / "wide", "papers100m", small.folder, "--memory", 1)
        assert tight.meta == wide.meta

    def test_a_changed_byte(self, tmp_path: Path, capsys) -> None:
        """The archive's own checksum of the features tells it."""
        small = small_graphs.papers100m(tmp_path / "bin")
        path = small.folder / "raw" / "data.npz"
        data = bytearray(path.read_bytes())
        at = data.index(small.features.tobytes())
        data[at + 100] ^= 1
        path.write_bytes(data)
        assert run(tmp_path / "data", "--set", "papers100m", "--source", small.folder) == 2
        assert "data.npz is damaged (Bad CRC-32" in told(capsys)
        assert not list((tmp_path / "data" / "graphs").iterdir())


class TestMAG240M:
    @pytest.mark.parametrize("tensors", [True, False])
    def test_becomes_a_graph(self, tmp_path: Path, tensors: bool) -> None:
        small = small_graphs.mag240m(tmp_path / "mag", tensors)
        graph = made(tmp_path / "data", "mag240m", small.folder)
        same_rows(graph, small, undirected=True, distinct=True)
        assert graph.dtype == np.float16 and (graph.features() == small.features).all()
        assert (graph.labels() == small.labels).all()
        parts = small_graphs.split(small_graphs.drawn(small.folder, 6, np.float16, 153))
        assert graph.part("train").tolist() == sorted(parts["train"])
        assert graph.part("val").tolist() == sorted(parts["valid"])
        assert len(graph.part("test")) == 0 and "not published" in graph.meta["test"]

    def test_arrays_of_an_older_numpy(self, tmp_path: Path) -> None:
        small = small_graphs.mag240m(tmp_path / "mag")
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

    def test_a_pickle_that_does_something_is_not_read(self, tmp_path: Path, capsys) -> None:
        small = small_graphs.mag240m(tmp_path / "mag")

        class Evil:
            def __reduce__(self):
                return Path.touch, (tmp_path / "evil",)

        torch.save({"train": Evil()}, small.folder / "split_dict.pt")
        assert run(tmp_path / "data", "--set", "mag240m", "--source", small.folder) == 2
        assert "split_dict.pt is no dictionary of arrays by torch.save" in told(capsys)
        assert not (tmp_path / "evil").exists()


class TestIGB:
    @pytest.mark.parametrize("name", ["igb-tiny", "igb-large"])
    def test_becomes_a_graph(self, tmp_path: Path, name: str) -> None:
        small = small_graphs.igb(tmp_path / "size", raw=name == "igb-large")
        graph = made(tmp_path / "data", name, small.folder)
        same_rows(graph, small, undirected=False, distinct=False)
        assert (graph.features() == small.features).all()
        assert (graph.labels() == small.labels).all() and graph.num_classes == 19
        assert graph.part("train").tolist() == list(range(24))
        assert graph.part("val").tolist() == list(range(24, 32))
        assert graph.part("test").tolist() == list(range(32, 40))

    @pytest.mark.parametrize("short", [True, False])
    def test_full_has_labels_up_to_a_node(self, tmp_path: Path, short: bool, monkeypatch) -> None:
        monkeypatch.setattr(graph_sets, "_IGB_LABELLED", 30)
        small = small_graphs.igb(tmp_path / "size", raw=True)
        path = small.folder / "processed" / "paper" / "node_label_19.npy"
        labels = np.fromfile(path, np.float32)
        labels[30:] = 77  # never read
        labels[: 30 if short else NODES].tofile(path)
        graph = made(tmp_path / "data", "igb-full", small.folder)
        assert (graph.labels()[:30] == small.labels[:30]).all()
        assert (graph.labels()[30:] == -1).all()
        assert [len(graph.part(part)) for part in ("train", "val", "test")] == [18, 6, 6]


class TestFriendster:
    def test_becomes_a_graph(self, tmp_path: Path) -> None:
        small = small_graphs.friendster(tmp_path / "snap")
        drawn = ["--features", 5, "--classes", 3, "--seed", 1]
        graph = made(tmp_path / "data", "friendster", small.folder, *drawn)
        assert set(small.sources) | set(small.targets) == set(range(NODES))
        same_rows(graph, small, undirected=True, distinct=True)
        assert graph.features().shape == (NODES, 5) and graph.num_classes == 3
        assert graph.meta["drawn"] == {"features": 5, "labels": 3, "seed": 1}
        assert graph.meta["parts"] == {"train": 4, "val": 1, "test": 1}
        again = made(tmp_path / "again", "friendster", small.folder, *drawn)
        assert again.meta == graph.meta

    def test_a_torn_file(self, tmp_path: Path, capsys) -> None:
        small = small_graphs.friendster(tmp_path / "snap")
        path = small.folder / "com-friendster.ungraph.txt.gz"
        path.write_bytes(path.read_bytes()[:-20])
        assert run(tmp_path / "data", "--set", "friendster", "--source", small.folder) == 2
        assert f"{path.name} is damaged (" in told(capsys)
        assert not list((tmp_path / "data" / "graphs").iterdir())


class TestGenerated:
    ARGUMENTS = ("--set", "generated", "--nodes", 200, "--features", 4, "--classes", 4)

    def test_another_rule_is_not_taken_for_it(self, tmp_path: Path, capsys) -> None:
        assert run(tmp_path, *self.ARGUMENTS) == 0
        capsys.readouterr()
        assert run(tmp_path, *self.ARGUMENTS, "--seed", 1) == 2
        assert "holds another graph; delete it first" in told(capsys)


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


CITES = "processed/paper___cites___paper/edge_index.npy"
FEATURES = "processed/paper/node_feat.npy"
LABELS = "processed/paper/node_label.npy"


class TestRefused:
    @pytest.mark.parametrize(
        ("name", "change", "says"),
        [
            (CITES, npy_with(NODES), "an edge names node 40, the nodes are 0 to 39"),
            (CITES, npy_with(-1), "an edge names node -1, the nodes are 0 to 39"),
            (CITES, replaced(np.zeros((3, 4), int)), "has the shape (3, 4), (2, any) is expected"),
            (CITES, replaced(np.zeros((2, 4))), "holds float64; whole numbers are needed"),
            (CITES, shorter, "edge_index.npy is damaged (it ends too early)"),
            (CITES, Path.unlink, "does not hold edge_index.npy"),
            (FEATURES, replaced(np.zeros((NODES, 2))), "holds float64; float16 or float32"),
            (FEATURES, replaced(np.array([["a"]])), "it holds <U1, and numbers are needed"),
            (FEATURES, lambda path: path.write_text("x" * 99), "node_feat.npy is damaged (the"),
            (FEATURES, shorter, "node_feat.npy is damaged (it ends too early)"),
            (LABELS, npy_with(153), "has the label 153, classes are 0 to 152"),
            (LABELS, npy_with(1.5), "has the label 1.5, classes"),
            (LABELS, replaced(np.zeros(7)), "has 7 labels, there are 40 nodes"),
            (LABELS, replaced(np.full(NODES, np.nan)), "split_dict.pt names nodes without a label"),
            ("split_dict.pt", Path.unlink, "does not hold split_dict.pt"),
            ("split_dict.pt", shorter, "split_dict.pt is no dictionary of arrays"),
            (
                "split_dict.pt",
                lambda path: torch.save(
                    {"train": torch.tensor([40]), "valid": torch.zeros(0)}, path
                ),
                "has parts that are no lists of nodes",
            ),
            (
                "split_dict.pt",
                lambda path: torch.save(dict.fromkeys(("train", "valid"), np.array([40])), path),
                "split_dict.pt names nodes outside of 0 to 39",
            ),
        ],
    )
    def test_a_source_in_one_line(
        self, tmp_path: Path, name: str, change: Callable[[Path], None], says: str, capsys
    ) -> None:
        small = small_graphs.mag240m(tmp_path / "mag")
        change(small.folder / name)
        assert run(tmp_path / "data", "--set", "mag240m", "--source", small.folder, *MEMORY) == 2
        line = told(capsys)
        assert line.startswith(f"error: --source={small.folder}") and says in line
        assert not list((tmp_path / "data" / "graphs").iterdir())

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ([], "--set=: name a graph: papers100m, mag240m"),
            (["--set", "mag240m"], "--source=: give the folder of mag240m: OGB-LSC's mag240m_kdd"),
            (["--set", "mag240m", "--source", "/none"], "--source=/none: no such folder; give the"),
            (
                ["--set", "papers100m", "--source", "."],
                "data.npz; give the folder of papers100m: O",
            ),
            (["--set", "mag240m", "--memory", 0], "--memory=0.0: must be above 0"),
            (["--set", "generated", "--source", "x"], "--source=x: generated has none"),
            (["--set", "generated", "--nodes", 3], "--nodes=3: must be 4 a class or more"),
            (["--set", "friendster", "--source", ".", "--classes", 1], "--classes=1: must be"),
            (["--set", "igb-tiny", "--source", "."], "does not hold node_feat.npy"),
            (["--set", "friendster", "--source", "."], "does not hold com-friendster.ungraph"),
        ],
        ids=str,
    )
    def test_a_value_in_one_line(
        self, tmp_path: Path, arguments: list[object], says: str, capsys, monkeypatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert run(tmp_path / "data", *arguments) == 2
        assert says in told(capsys)

    def test_a_download_in_the_way_is_kept(self, tmp_path: Path, capsys) -> None:
        small = small_graphs.mag240m(tmp_path / "graphs" / "mag240m")
        before = set(tmp_path.rglob("*"))
        assert run(tmp_path, "--set", "mag240m", "--source", small.folder) == 2
        assert "is in the way: it holds files that are not ours" in told(capsys)
        assert set(tmp_path.rglob("*")) == before


def test_check_compares_with_the_published_counts(tmp_path: Path, capsys, monkeypatch) -> None:
    small = small_graphs.igb(tmp_path / "size")
    folder = made(tmp_path, "igb-tiny", small.folder).folder
    capsys.readouterr()
    assert run(tmp_path, "--check", folder) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{folder}: nodes is 40, igb-tiny has 100000",
        f"{folder}: 1 faults",
    ]
    monkeypatch.setitem(prepare.KNOWN, "igb-tiny", {"nodes": 40, "train": 24})
    assert run(tmp_path, "--check", folder) == 0
    meta = json.loads((folder / "graph.json").read_text())
    labels = np.memmap(folder / "labels.bin", np.int16, mode="r+")
    labels[3] = 19
    labels.flush()
    capsys.readouterr()
    assert run(tmp_path, "--check", folder) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{folder}/labels.bin: its checksum is not that of graph.json",
        f"{folder}/labels.bin: has labels outside of -1 to 18",
        f"{folder}: 2 faults",
    ]
    assert meta["source"] == "IGB260M, homogeneous"
