"""The embedded graph and the generated one, and the rows of neighbours that all graphs have."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from co2.errors import ConfigError
from tasks.graph import calls, edges, generated
from tasks.graph.folder import PARTS, GraphFolder, faults
from tasks.graph.source import Program


def brute(
    sources: np.ndarray, targets: np.ndarray, nodes: int, undirected: bool, distinct: bool
) -> list[list[int]]:
    """The neighbours of each node, with lists alone."""
    rows: list[list[int]] = [[] for _ in range(nodes)]
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        if source != target:
            rows[target].append(source)
            if undirected:
                rows[source].append(target)
    return [sorted(set(row) if distinct else row) for row in rows]


def written(folder: Path, nodes: int) -> list[list[int]]:
    starts = np.fromfile(folder / "starts.bin", np.int64)
    neighbours = np.fromfile(folder / "neighbours.bin", np.int32)
    assert len(starts) == nodes + 1 and starts[0] == 0 and starts[-1] == len(neighbours)
    return [part.tolist() for part in np.split(neighbours, starts[1:-1])]


def nearest_mean(rows: np.ndarray, graph: GraphFolder) -> float:
    """Test accuracy of the class whose mean over train is nearest, a model without training."""
    labels, train, test = graph.labels(), graph.part("train"), graph.part("test")
    means = np.stack([rows[train][labels[train] == c].mean(0) for c in range(graph.num_classes)])
    scores = rows[test] @ means.T - (means**2).sum(1) / 2
    return float((scores.argmax(1) == labels[test]).mean())


def neighbourhood(graph: GraphFolder) -> np.ndarray:
    """The mean over each node and its neighbours, [nodes, features]."""
    rows = graph.features().astype(np.float32)
    degrees = np.diff(graph.starts())
    total = rows.copy()
    np.add.at(total, np.repeat(np.arange(graph.num_nodes), degrees), rows[graph.neighbours()])
    return total / (degrees[:, None] + 1)


class TestRows:
    @pytest.mark.parametrize("undirected", [True, False])
    @pytest.mark.parametrize("distinct", [True, False])
    @pytest.mark.parametrize("memory", [2048, 1 << 30])
    def test_equal_brute_force(
        self,
        tmp_path: Path,
        undirected: bool,
        distinct: bool,
        memory: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        nodes, draw = 5000, np.random.default_rng(0)
        # Half of the edges lead to a few nodes next to each other, in one bucket.
        sources, targets = draw.integers(nodes, size=(2, 4000))
        targets[::2] = 700 + draw.integers(4, size=2000)
        targets[:9] = sources[:9]
        buckets, split = [], edges._sorted_buckets

        def seen(*args: object) -> Iterator[tuple[int, int, np.ndarray]]:
            for low, high, part in split(*args):
                buckets.append((high - low, part.nbytes))
                yield low, high, part

        monkeypatch.setattr(edges, "_sorted_buckets", seen)
        pieces = [(sources[at : at + 999], targets[at : at + 999]) for at in range(0, 4000, 999)]
        count = edges.write_rows(
            tmp_path, pieces, nodes, undirected=undirected, distinct=distinct, memory=memory
        )
        expected = brute(sources, targets, nodes, undirected, distinct)
        assert written(tmp_path, nodes) == expected
        assert count == sum(map(len, expected))
        assert {path.name for path in tmp_path.iterdir()} == {"starts.bin", "neighbours.bin"}
        if memory == 2048:
            assert all(width == 1 or size * 4 <= memory for width, size in buckets)

    @pytest.mark.parametrize("wrong", [-1, 10])
    def test_an_edge_out_of_the_graph(self, tmp_path: Path, wrong: int) -> None:
        ends = np.array([1, 2, wrong]), np.array([3, 4, 5])
        for pair in (ends, ends[::-1]):
            folder = tmp_path / str(pair is ends)
            folder.mkdir()
            with pytest.raises(ValueError, match=f"names node {wrong}, the nodes are 0 to 9"):
                edges.write_rows(folder, [pair], 10, undirected=True, distinct=True)

    def test_no_edges(self, tmp_path: Path) -> None:
        assert edges.write_rows(tmp_path, [], 3, undirected=True, distinct=True) == 0
        assert written(tmp_path, 3) == [[], [], []]


PACKAGE = {
    "__init__.py": "from .core import *\nfrom pack.core.base import helper as aid",
    "core/__init__.py": "from .base import Base, helper",
    "core/base.py": '''
import os
from math import sqrt

def helper(x):
    """Join paths of sympy.core.base.

    >>> from pack.core import helper
    """
    return os.unique_elsewhere(sqrt(len(x)))

@decorated
class Base:
    def __new__(cls):
        return helper(cls)
    def run(self):
        def inner():
            return helper(1)
        return inner() + self.step()
    def step(self):
        return []
''',
    "poly/tools.py": """
import pack.core.base as b
from pack import aid, Base
from ..core import base

class Tool(Base):
    def step(self):
        from pack.poly.other import far
        far(1).append(2)
        return super().step()
    def go(self, run):
        self.run()
        run()
        return Base()

if True:
    def use(x):
        x.rare()
        x.unique_elsewhere()
        b.helper(x); base.helper(x)
        return aid(Tool())

def append(): return missing()
def unique_elsewhere(): return use
""",
    "poly/other.py": """
def far(x): return sqrt(x)
async def rare(): await rare()
def many(): return 0
class A:
    def many(self): return x.many()
class B:
    def many(self): return 1
class C:
    def many(self): return 1
""",
}


class TestCalls:
    def test_are_resolved(self) -> None:
        program = Program("pack", PACKAGE)
        names = [function.qualified for function in program.functions]
        found: dict[str, set[str]] = {}
        for caller, called in program.calls():
            found.setdefault(names[caller], set()).add(names[called])
        tool, base = "poly.tools.Tool", "core.base.Base"
        assert found == {
            f"{base}.__new__": {"core.base.helper"},
            f"{base}.run": {"core.base.helper", f"{base}.step"},
            f"{tool}.step": {"poly.other.far", f"{base}.step"},
            f"{tool}.go": {f"{base}.run", f"{base}.__new__"},
            # x.append is a list's, and four functions are called `many`
            "poly.tools.use": {
                "poly.other.rare",
                "poly.tools.unique_elsewhere",
                "core.base.helper",
                f"{base}.__new__",
            },
            "poly.other.rare": {"poly.other.rare"},
        }

    def test_graph_of_a_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(calls, "FEWEST", 5)
        meta = calls.fill(tmp_path, "pack", PACKAGE)
        names = [function.qualified for function in Program("pack", PACKAGE).functions]
        rows = written(tmp_path, len(names))
        helper = names.index("core.base.helper")
        callers = ["core.base.Base.__new__", "core.base.Base.run", "poly.tools.use"]
        assert rows[helper] == [names.index(name) for name in callers]
        assert rows[names.index("poly.tools.use")].count(helper) == 1  # called three times
        assert rows[names.index("poly.other.rare")] == [names.index("poly.tools.use")]
        assert meta["class_names"] == ["poly"]  # core has four functions
        labels = np.fromfile(tmp_path / "labels.bin", np.int16)
        assert [name for name, label in zip(names, labels, strict=True) if label < 0] == names[:4]
        assert sum(meta["parts"].values()) == len(names) - 4

    def test_features_are_hashed_words(self) -> None:
        one = calls.features_of("Alpha")
        # crc32(b"alpha") is 0xd0e0396a; its lowest seven bits are the place, its highest the sign.
        assert np.flatnonzero(one).tolist() == [0x6A] and one[0x6A] == 1
        mixed = calls.features_of("alphaBETA_alpha = return self.x")
        assert np.isclose(np.linalg.norm(mixed), 1)
        beta = calls.features_of("beta")
        assert np.allclose(mixed, (2**0.5 * one + beta) / 3**0.5)
        assert not calls.features_of("x = 1").any()

    def test_features_do_not_name_the_package(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another package of another name, which imports other things, has the same features."""
        rows = []
        for name, imported in (("poly", "sympy.poly.tools"), ("core", "sympy.core.base")):
            text = (
                f"from {imported} import everything\n"
                "def f(x):\n"
                f"    from {imported} import (thing,\n        {name}_other)\n"
                f'    """See {imported}.\n\n    >>> from {imported} import this\n    """\n'
                "    return thing(x)\n"
            )
            folder = tmp_path / name
            folder.mkdir()
            calls.fill(folder, "pack", {f"{name}/m.py": text})
            rows.append(np.fromfile(folder / "features.bin", np.float32))
        assert rows[0].any() and (rows[0] == rows[1]).all()

    @pytest.mark.slow  # reads all of sympy
    def test_sympy(self, call_graph: GraphFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        graph = call_graph
        assert not list(faults(graph.folder))
        assert (graph.num_nodes, graph.num_classes) == (20218, 23)  # sympy is pinned
        starts, neighbours = graph.starts(), graph.neighbours()
        owners = np.repeat(np.arange(graph.num_nodes), np.diff(starts))
        there = owners * graph.num_nodes + neighbours
        back = neighbours.astype(np.int64) * graph.num_nodes + owners
        assert (np.diff(there) > 0).all() and (np.sort(back) == there).all()
        assert (np.diff(starts) == 0).mean() < 0.25
        norms = np.linalg.norm(graph.features(), axis=1)
        assert (norms == 0).mean() < 0.01 and np.allclose(norms[norms > 0], 1, atol=1e-5)
        parts = np.concatenate([graph.part(name) for name in PARTS])
        assert len(np.unique(parts)) == len(parts) == (graph.labels() >= 0).sum()
        shares = [len(graph.part(name)) / len(parts) for name in PARTS]
        assert np.allclose(shares, [0.6, 0.2, 0.2], atol=0.02)
        monkeypatch.setattr(calls, "fill", None)  # made already
        assert calls.prepared(graph.folder.parent.parent).meta == graph.meta

    @pytest.mark.slow
    def test_neighbours_help(self, call_graph: GraphFolder) -> None:
        own = call_graph.features()
        both = np.concatenate([own, neighbourhood(call_graph)], axis=1)
        assert nearest_mean(both, call_graph) > nearest_mean(own, call_graph) + 0.03

    def test_a_place_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "graphs").write_text("a file")
        with pytest.raises(ConfigError, match=r"^data.root=.*: cannot write .*; choose another$"):
            calls.prepared(tmp_path)


@pytest.fixture(scope="session")
def call_graph(tmp_path_factory: pytest.TempPathFactory) -> GraphFolder:
    return calls.prepared(tmp_path_factory.mktemp("calls"))


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> GraphFolder:
    folder = tmp_path_factory.mktemp("generated") / "graph"
    return generated.generate(folder, 20_000, 32, 8, 15, seed=0)


def with_sum(folder: Path, name: str, dtype: type, change: Callable[[np.ndarray], None]) -> None:
    """Change a file and, as if it had been written so, its checksum in graph.json."""
    values = np.fromfile(folder / name, dtype)
    change(values)
    values.tofile(folder / name)
    meta = json.loads((folder / "graph.json").read_text())
    meta["sha256"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "graph.json").write_text(json.dumps(meta))


def put(place: int, value: int) -> Callable[[np.ndarray], None]:
    def change(values: np.ndarray) -> None:
        values[place] = value

    return change


DAMAGED = [
    ("starts.bin", np.int64, put(0, 1), "does not rise from 0"),
    ("starts.bin", np.int64, put(5, 1 << 40), "does not rise from 0"),
    ("neighbours.bin", np.int32, put(-1, 300), "names nodes outside of 0 to 299"),
    ("neighbours.bin", np.int32, put(0, -1), "names nodes outside of 0 to 299"),
    ("labels.bin", np.int16, put(3, 8), "has labels outside of -1 to 7"),
    ("labels.bin", np.int16, put(3, -2), "has labels outside of -1 to 7"),
    ("train.bin", np.int64, put(-1, 300), "names nodes outside of 0 to 299"),
    ("val.bin", np.int64, lambda nodes: put(1, nodes[0])(nodes), "its nodes do not ascend"),
]


class TestFaults:
    """What `tasks.prepare verify` finds in a graph."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return generated.generate(tmp_path / "graph", 300, 4, 8, 5, seed=0).folder

    @pytest.mark.parametrize(("name", "dtype", "change", "says"), DAMAGED)
    def test_what_no_graph_can_have(
        self,
        folder: Path,
        name: str,
        dtype: type,
        change: Callable[[np.ndarray], None],
        says: str,
    ) -> None:
        with_sum(folder, name, dtype, change)
        [line] = faults(folder)
        assert line.startswith(f"{folder / name}: {says}")

    def test_a_node_of_a_part_has_a_label(self, folder: Path) -> None:
        node = np.fromfile(folder / "test.bin", np.int64)[0]
        with_sum(folder, "labels.bin", np.int16, put(node, -1))
        assert list(faults(folder)) == [f"{folder / 'test.bin'}: has nodes without a label"]

    def test_a_checksum(self, folder: Path) -> None:
        size = (folder / "features.bin").stat().st_size
        (folder / "features.bin").write_bytes(bytes(size))
        line = f"{folder / 'features.bin'}: its checksum is not that of graph.json"
        assert list(faults(folder)) == [line]

    def test_a_file_is_missing(self, folder: Path) -> None:
        (folder / "graph.json").unlink()
        assert list(faults(folder)) == [f"{folder / 'graph.json'}: is missing"]


class TestGenerated:
    def test_is_a_graph_of_its_rule(self, graph: GraphFolder) -> None:
        assert not list(faults(graph.folder))
        assert (graph.num_nodes, graph.num_features, graph.num_classes) == (20_000, 32, 8)
        degrees = np.diff(graph.starts())
        assert 14 < degrees.mean() <= 15 and degrees.min() > 0
        assert degrees.max() > 30 * degrees.mean()
        # A tail with exponent 2.5 leaves a share of x^-1.5 above x.
        beyond = [(degrees > limit).mean() for limit in (40, 160)]
        assert 4 < beyond[0] / beyond[1] < 16

    def test_neighbours_are_of_a_class(
        self, graph: GraphFolder, tmp_path: Path, monkeypatch
    ) -> None:
        monkeypatch.setattr(generated, "_SHARES", {"train": 2, "val": 4, "test": 4})
        whole = generated.generate(tmp_path / "labelled", 20_000, 32, 8, 15, seed=0)
        labels = whole.labels()
        assert labels.min() == 0 and np.bincount(labels).tolist() == [2500] * 8
        owners = np.repeat(np.arange(whole.num_nodes), np.diff(whole.starts()))
        same = (labels[owners] == labels[whole.neighbours()]).mean()
        assert abs(same - (0.7 + 0.3 / 8)) < 0.02
        # The number of a node tells neither class nor degree.
        ids = np.arange(whole.num_nodes)
        assert abs(np.corrcoef(ids, labels)[0, 1]) < 0.03
        assert abs(np.corrcoef(ids, np.diff(whole.starts()))[0, 1]) < 0.03

    def test_parts(self, graph: GraphFolder) -> None:
        sizes = {name: len(graph.part(name)) for name in PARTS}
        assert sizes == {"train": 2000, "val": 400, "test": 400}
        chosen = np.concatenate([graph.part(name) for name in PARTS])
        assert len(np.unique(chosen)) == 2800
        assert sorted(np.flatnonzero(graph.labels() >= 0)) == sorted(chosen)

    def test_a_node_alone_tells_little(self, graph: GraphFolder) -> None:
        alone = nearest_mean(graph.features(), graph)
        assert 1 / 8 < alone < 0.5
        assert nearest_mean(neighbourhood(graph), graph) > alone + 0.25

    def test_depends_on_its_arguments_alone(self, graph: GraphFolder, tmp_path: Path) -> None:
        np.random.default_rng().random()
        again = generated.generate(tmp_path / "again", 20_000, 32, 8, 15, seed=0)
        assert again.meta["sha256"] == graph.meta["sha256"]
        other = generated.generate(tmp_path / "other", 20_000, 32, 8, 15, seed=1)
        assert not set(other.meta["sha256"].values()) & set(graph.meta["sha256"].values())

    def test_halves(self, graph: GraphFolder, tmp_path: Path) -> None:
        half = generated.generate(tmp_path / "half", 20_000, 32, 8, 15, seed=0, dtype="float16")
        assert half.row_bytes == 64
        assert (half.features() == graph.features().astype(np.float16)).all()

    def test_features_are_never_together(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes, write = [], generated.write_array

        def watched(path: Path, pieces, dtype) -> int:
            def seen() -> Iterator[np.ndarray]:
                for piece in pieces:
                    sizes.append((path.name, piece.size))
                    yield piece

            return write(path, seen(), dtype)

        monkeypatch.setattr(generated, "write_array", watched)
        monkeypatch.setattr(generated, "_VALUES_AT_ONCE", 4096)
        generated.generate(tmp_path / "graph", 2000, 64, 4, 6, seed=0)
        features = [size for name, size in sizes if name == "features.bin"]
        assert sum(features) == 2000 * 64 and max(features) <= 4096

    def test_is_made_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = generated.generate(tmp_path / "graph", 100, 4, 2, 4, seed=0)
        monkeypatch.setattr(generated, "create", None)
        assert generated.generate(tmp_path / "graph", 100, 4, 2, 4, seed=0).meta == first.meta
        with pytest.raises(FileExistsError, match="another graph"):
            generated.generate(tmp_path / "graph", 100, 4, 2, 4, seed=1)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"nodes": 7},
            {"nodes": 2**32},
            {"features": 0},
            {"classes": 1},
            {"degree": 1},
            {"degree": 51},
            {"seed": -1},
            {"dtype": "float64"},
        ],
        ids=str,
    )
    def test_arguments_out_of_range(self, tmp_path: Path, wrong: dict[str, object]) -> None:
        (key, value), folder = next(iter(wrong.items())), tmp_path / "graph"
        right = {"nodes": 100, "features": 4, "classes": 2, "degree": 4, "seed": 0}
        with pytest.raises(ConfigError, match=f"^{key}={value}: must be "):
            generated.generate(folder, **(right | wrong))
        assert not folder.exists()
