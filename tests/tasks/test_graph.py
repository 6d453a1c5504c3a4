"""The task graph: sampled neighbourhoods, its models and figures, what it refuses. The embedded
graph and the generated one, and the rows of neighbours that all graphs have.

Batches are in test_graph_stores.py, public graphs in test_prepare_graph.py.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from co2.config import OptimConfig
from tasks.graph import calls, generated
from tasks.graph.edges import write_rows
from tasks.graph.folder import PARTS, faults
from tasks.graph.graph import Graph
from tasks.graph.networks import Edges, GraphNetwork, Network
from tasks.graph.sampling import Neighbourhood, Restricted, Topology
from tasks.graph.source import Program
from tasks.shared.randomness import generator
from tests.tasks import random_graph
from tests.tasks.build import built, refusal, used

# Node 0 has 4 neighbours, 1 has 1, 2 has none, 3 has 2, 4 has 3.
LISTS = [[1, 2, 3, 4], [0], [], [0, 4], [0, 1, 3]]


@pytest.fixture
def topology() -> Topology:
    starts = np.cumsum([0, *map(len, LISTS)])
    return Topology(starts, np.concatenate([np.array(own, np.int32) for own in LISTS]))


def edges(whole: Neighbourhood, layer: int) -> list[list[int]]:
    """The ids of the neighbours of each node of a layer."""
    own = whole.layers[layer]
    cut = np.split(whole.nodes[own.sources], own.starts[1:-1])
    return [part.tolist() for part in cut]


def test_many_are_drawn_alike_and_without_repetition(topology: Topology) -> None:
    """Each pair of node 0's four neighbours is equally likely."""
    random, seen = generator(0), Counter[tuple[int, ...]]()
    for _ in range(300):
        _, found = topology.sample(np.zeros(20, np.int64), 2, random)
        seen.update(tuple(sorted(pair)) for pair in found.reshape(-1, 2).tolist())
    assert len(seen) == 6 and all(first != second for first, second in seen)
    assert all(abs(times - 1000) < 5 * 1000**0.5 for times in seen.values())


def test_neighbourhood(topology: Topology) -> None:
    """Nodes of the batch come first, then those that each layer adds, by their ids; a layer samples
    for all nodes that are known by then. Few neighbours are all taken."""
    starts, found = topology.sample(np.array([3, 2, 1]), 2, generator(0))
    assert starts.tolist() == [0, 2, 2, 3] and found.tolist() == [0, 4, 0]
    whole = topology.neighbourhood(np.array([3, 1]), (9, 9), generator(0))
    assert whole.nodes.tolist() == [3, 1, 0, 4, 2]
    assert whole.num_targets == 2
    assert edges(whole, 1) == [[0, 4], [0]]
    assert edges(whole, 0) == [[0, 4], [0], [1, 2, 3, 4], [0, 1, 3]]
    # Of some nodes only those are sampled, also for a node that is not among them.
    within = np.array([True, False, True, True, False])
    whole = Restricted(topology, within).neighbourhood(np.array([4, 0]), (9,), generator(0))
    assert edges(whole, 0) == [[0, 3], [2, 3]]


def test_every_edge_is_one(topology: Topology) -> None:
    fanout = (2, 1, 2)
    whole = topology.neighbourhood(np.array([0, 4]), fanout, generator(1))
    assert len(set(whole.nodes.tolist())) == len(whole.nodes)
    for layer, most in enumerate(fanout):
        for node, own in zip(whole.nodes.tolist(), edges(whole, layer), strict=False):
            assert len(own) == min(most, len(LISTS[node])) and set(own) <= set(LISTS[node])
            assert len(set(own)) == len(own)


def adjacency(edges: Edges, nodes: int) -> Tensor:
    """How many edges lead from a node to a target, [targets, nodes]."""
    starts, sources = edges
    dense = torch.zeros(len(starts) - 1, nodes, dtype=torch.float64)
    for target, own in enumerate(sources.tensor_split(starts[1:-1])):
        dense[target] += own.bincount(minlength=nodes)
    return dense


def sage(layer: nn.Module, x: Tensor, edges: Edges) -> Tensor:
    """GraphSAGE's formula with matrices of all targets and nodes."""
    near = adjacency(edges, len(x))
    mean = near @ x / near.sum(1, keepdim=True).clamp(min=1)
    own = x[: len(near)] @ layer.lin_r.weight.T
    return own + mean @ layer.lin_l.weight.T + layer.lin_l.bias


def gat(layer: nn.Module, x: Tensor, edges: Edges) -> Tensor:
    """GAT's."""
    near = adjacency(edges, len(x))
    near = near + torch.eye(*near.shape)
    values = (x @ layer.lin.weight.T).unflatten(1, (layer.heads, -1))
    source, target = ((values * part).sum(2) for part in (layer.att_src[0], layer.att_dst[0]))
    score = target[: len(near), None] + source[None]  # [targets, nodes, heads]
    score = torch.where(score > 0, score, 0.2 * score)
    share = (score + near.log()[..., None]).softmax(1)  # of edges, and none where there are none
    made = torch.einsum("tnh,nhw->thw", share, values)
    return (made.flatten(1) if layer.concat else made.mean(1)) + layer.bias


FORMULAS = {Network.sage: (sage, torch.relu), Network.gat: (gat, F.elu)}


@pytest.mark.parametrize("kind", Network)
def test_equals_its_formula(kind: Network) -> None:
    """Logits, and the gradients of all weights and features. The second of the targets has no
    neighbours in the first layer, and the last one none in the second."""
    torch.manual_seed(0)
    model = GraphNetwork(kind, (4, 6, 3), heads=2, dropout=0.0).double()
    for weight in model.parameters():
        nn.init.normal_(weight)
    own = [
        (torch.tensor([0, 3, 3, 5]), torch.tensor([1, 3, 4, 0, 2])),
        (torch.tensor([0, 1, 1]), torch.tensor([2])),
    ]
    formula, between = FORMULAS[kind]

    def written(x: Tensor, edges: list[Edges]) -> Tensor:
        first, last = model.layers
        return formula(last, between(formula(first, x, edges[0])), edges[1])

    found = []
    for compute in (model, written):
        x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        out = compute(x.requires_grad_(), own)
        assert out.shape == (2, 3)
        found.append((out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_graph.write(tmp_path_factory.mktemp("graph") / "mine").folder


def ready(path: Path, **given: Any) -> Graph:
    defaults = {"batch_size": 10, "optim": OptimConfig(lr=1e-2), "num_workers": 1}
    return built("graph", path=path, **{**defaults, **given})


def test_what_cannot_be_used(tmp_path: Path) -> None:
    line = refusal(lambda: Graph.Config(fanout=[]))
    assert line.startswith("fanout=[]: must have a number for each layer")
    line = refusal(lambda: Graph.Config(model=Network.gat, hidden=30))
    assert line.startswith("heads=4: must divide hidden=30")
    assert "is no sound graph: graph.json or a file beside it is missing" in refusal(
        lambda: ready(tmp_path)
    )


class Majority(nn.Module):
    """Its answer is always the same class, with little doubt."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(F.one_hot(torch.tensor(kind), 3).float())

    def forward(self, x: Tensor, edges: list[Edges]) -> Tensor:
        return self.bias.expand(len(edges[-1][0]) - 1, 3)


def test_figures(folder: Path) -> None:
    task = ready(folder)
    counts = np.bincount(task.graph.labels()[task.graph.part("val")])
    found = task.evaluate(Majority(int(counts.argmax())))
    share = counts.max() / counts.sum()
    right, wrong = -torch.tensor([1.0, 0.0, 0.0]).log_softmax(0)[:2].double()
    assert found["accuracy"] == pytest.approx(share) == task.baselines()["majority_accuracy"]
    assert found["loss"] == pytest.approx((share * right + (1 - share) * wrong).item())
    # GraphSAGE of papers100M: two matrices and a bias for each layer.
    model = GraphNetwork(Network.sage, (128, 256, 256, 172), 4, 0.2)
    pairs = ((128, 256), (256, 256), (256, 172))
    expected = sum(2 * wide * narrow + narrow for wide, narrow in pairs)
    assert sum(weight.numel() for weight in model.parameters()) == expected


def test_another_graph(tmp_path: Path, folder: Path) -> None:
    """It has another fingerprint; its halves are stored and moved so, and computed with in fp32."""
    task = ready(random_graph.write(tmp_path / "half", dtype="float16", seed=1).folder)
    assert task.fingerprint()["sha256"] != ready(folder).fingerprint()["sha256"]
    (batch,) = used(task)
    assert batch["features"].dtype == torch.float16
    assert task.loss(task.model(), batch).dtype == torch.float32


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


@pytest.mark.parametrize("undirected", [True, False])
@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize("memory", [2048, 1 << 30])
def test_rows_by_brute_force(tmp_path: Path, undirected: bool, distinct: bool, memory: int) -> None:
    """Also where memory holds a small part of the edges."""
    nodes, draw = 5000, np.random.default_rng(0)
    # Half of the edges lead to a few nodes next to each other, in one bucket.
    sources, targets = draw.integers(nodes, size=(2, 4000))
    targets[::2] = 700 + draw.integers(4, size=2000)
    targets[:9] = sources[:9]
    pieces = [(sources[at : at + 999], targets[at : at + 999]) for at in range(0, 4000, 999)]
    count = write_rows(
        tmp_path, pieces, nodes, undirected=undirected, distinct=distinct, memory=memory
    )
    expected = brute(sources, targets, nodes, undirected, distinct)
    assert written(tmp_path, nodes) == expected
    assert count == sum(map(len, expected))
    assert {path.name for path in tmp_path.iterdir()} == {"starts.bin", "neighbours.bin"}


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
from ..core.base import helper
def lost(): return Base()  # one name is imported, not all
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


def test_calls_are_resolved() -> None:
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
            *("poly.other.rare", "poly.tools.unique_elsewhere"),
            *("core.base.helper", f"{base}.__new__"),
        },
        "poly.other.rare": {"poly.other.rare"},
    }


def test_graph_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_features_are_hashed_words() -> None:
    one = calls.features_of("Alpha")
    # crc32(b"alpha") is 0xd0e0396a; its lowest seven bits are the place, its highest the sign.
    assert np.flatnonzero(one).tolist() == [0x6A] and one[0x6A] == 1
    mixed = calls.features_of("alphaBETA_alpha = return self.x")
    assert np.isclose(np.linalg.norm(mixed), 1)
    beta = calls.features_of("beta")
    assert np.allclose(mixed, (2**0.5 * one + beta) / 3**0.5)
    assert not calls.features_of("x = 1").any()


def test_features_do_not_name_the_package(tmp_path: Path) -> None:
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


def test_a_generated_graph_is_of_its_rule(tmp_path: Path) -> None:
    whole = generated.generate(tmp_path / "graph", 20_000, 32, 8, 15, seed=0)
    assert not list(faults(whole.folder))
    assert (whole.num_nodes, whole.num_features, whole.num_classes) == (20_000, 32, 8)
    degrees = np.diff(whole.starts())
    assert 14 < degrees.mean() <= 15 and degrees.min() > 0
    assert degrees.max() > 30 * degrees.mean()
    # A tail with exponent 2.5 leaves a share of x^-1.5 above x.
    beyond = [(degrees > limit).mean() for limit in (40, 160)]
    assert 4 < beyond[0] / beyond[1] < 16
    chosen = [whole.part(name) for name in PARTS]
    assert list(map(len, chosen)) == [2000, 400, 400]
    labelled = np.flatnonzero(whole.labels() >= 0)
    assert sorted(np.concatenate(chosen)) == sorted(labelled)


def test_neighbours_in_a_generated_graph_are_of_a_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
