"""The task graph: sampled neighbourhoods, its models and figures, what it refuses. Batches are in
test_graph_stores.py.
"""

import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from co2.config import OptimConfig
from co2.errors import ConfigError
from tasks.graph.graph import Graph
from tasks.graph.networks import Edges, GraphNetwork, Network
from tasks.graph.sampling import Neighbourhood, Restricted, Topology
from tasks.graph.stores import StoreName
from tasks.shared.randomness import generator
from tests.tasks import random_graph
from tests.tasks.build import built, mesh
from tests.tasks.waits import no_waits

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


def test_few_neighbours_are_all_taken(topology: Topology) -> None:
    starts, found = topology.sample(np.array([3, 2, 1]), 2, generator(0))
    assert starts.tolist() == [0, 2, 2, 3]
    assert found.tolist() == [0, 4, 0]


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
    for all nodes that are known by then."""
    whole = topology.neighbourhood(np.array([3, 1]), (9, 9), generator(0))
    assert whole.nodes.tolist() == [3, 1, 0, 4, 2]
    assert whole.num_targets == 2
    assert edges(whole, 1) == [[0, 4], [0]]
    assert edges(whole, 0) == [[0, 4], [0], [1, 2, 3, 4], [0, 1, 3]]


@pytest.mark.parametrize("fanout", [(1, 2), (2, 1), (3,), (2, 2, 2)])
def test_every_edge_is_one(topology: Topology, fanout: tuple[int, ...]) -> None:
    whole = topology.neighbourhood(np.array([0, 4]), fanout, generator(1))
    assert len(set(whole.nodes.tolist())) == len(whole.nodes)
    for layer, most in enumerate(fanout):
        for node, own in zip(whole.nodes.tolist(), edges(whole, layer), strict=False):
            assert len(own) == min(most, len(LISTS[node])) and set(own) <= set(LISTS[node])
            assert len(set(own)) == len(own)


def test_the_same_key_samples_the_same(topology: Topology) -> None:
    one, other, third = (
        topology.neighbourhood(np.arange(5), (2, 2), generator(key)) for key in (7, 7, 8)
    )
    assert edges(one, 1) == edges(other, 1) and edges(one, 0) == edges(other, 0)
    assert [edges(one, 1), edges(one, 0)] != [edges(third, 1), edges(third, 0)]


def test_within_some_nodes(topology: Topology) -> None:
    """Of the neighbours only those within are sampled, also of a node that is not."""
    within = np.array([True, False, True, True, False])
    whole = Restricted(topology, within).neighbourhood(np.array([4, 0]), (9,), generator(0))
    assert edges(whole, 0) == [[0, 3], [2, 3]]


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


@pytest.mark.parametrize("kind", Network)
def test_autocast_adds_neighbours_up_in_fp32(kind: Network, topology: Topology) -> None:
    model = GraphNetwork(kind, (4, 8, 3), heads=2, dropout=0.0)
    types = []
    for layer in model.layers:
        layer.register_message_forward_hook(lambda *given: types.append(given[-1].dtype))
    whole = topology.neighbourhood(np.arange(5), (4, 4), generator(0))
    own = [(torch.from_numpy(one.starts), torch.from_numpy(one.sources)) for one in whole.layers]
    x = torch.randn(len(whole.nodes), 4)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x, own)
    assert types == [torch.float32] * 2
    torch.testing.assert_close(found.float(), model(x, own), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", Network)
def test_gradients_reach_every_weight(kind: Network, topology: Topology) -> None:
    model = GraphNetwork(kind, (4, 8, 3), heads=2, dropout=0.5)
    whole = topology.neighbourhood(np.array([0, 3]), (2, 2), generator(0))
    own = [(torch.from_numpy(one.starts), torch.from_numpy(one.sources)) for one in whole.layers]
    logits = model(torch.randn(len(whole.nodes), 4), own)
    assert logits.shape == (2, 3)
    logits.logsumexp(1).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_graph.write(tmp_path_factory.mktemp("graph") / "mine").folder


def graph(path: Path | None, **given: Any) -> Graph:
    optim = OptimConfig(lr=1e-2)
    return built("graph", path=path, **{"batch_size": 10, "optim": optim, **given})


ready = partial(graph, num_workers=2)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"fanout": []}, "fanout=[]: must have a number for each layer"),
        ({"model": Network.gat, "hidden": 30}, "heads=4: must divide hidden=30"),
    ],
)
def test_wrong_values(config: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(line)):
        Graph.Config(**config)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.path=.*: is no sound graph; docs/data.md has the"):
        graph(tmp_path).setup(1)


def test_the_published_size() -> None:
    """GraphSAGE of papers100M: two matrices and a bias for each layer."""
    with torch.device("meta"):
        model = GraphNetwork(Network.sage, (128, 256, 256, 172), 4, 0.2)
    pairs = ((128, 256), (256, 256), (256, 172))
    expected = sum(2 * wide * narrow + narrow for wide, narrow in pairs)
    assert sum(weight.numel() for weight in model.parameters()) == expected


def test_figures(folder: Path) -> None:
    """Of a model whose answer is known: the majority's class with little doubt."""
    task = ready(folder)
    labels = task.graph.labels()[task.graph.part("val")]
    counts = np.bincount(labels)

    class Fixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(
                torch.nn.functional.one_hot(torch.tensor(int(counts.argmax())), 3).float()
            )

        def forward(self, x: torch.Tensor, edges: Any) -> torch.Tensor:
            return self.bias.expand(len(edges[-1][0]) - 1, 3)

    found = task.evaluate(Fixed())
    share = counts.max() / counts.sum()
    right, wrong = -torch.tensor([1.0, 0.0, 0.0]).log_softmax(0)[:2].double()
    assert found["accuracy"] == pytest.approx(share) == task.baselines()["majority_accuracy"]
    assert found["loss"] == pytest.approx((share * right + (1 - share) * wrong).item())


def test_fingerprint_changes_with_the_data(tmp_path: Path, folder: Path) -> None:
    other = random_graph.write(tmp_path / "other", seed=1).folder
    found = [ready(path).fingerprint()["sha256"] for path in (folder, folder, other)]
    assert found[0] == found[1] != found[2]


def test_half_precision_features(tmp_path: Path) -> None:
    """They are stored and moved as they are, and computed with in fp32."""
    task = ready(random_graph.write(tmp_path / "half", dtype="float16").folder)
    batches = task.batches(mesh(0, 2), 0)
    batch = next(batches)
    batches.close()
    assert batch["features"].dtype == torch.float16
    assert task.loss(task.model(), batch).dtype == torch.float32


@pytest.mark.parametrize("kind", Network)
def test_no_host_waits_in_a_step(tmp_path: Path, folder: Path, kind: Network) -> None:
    """Also where some features are on the device already."""
    task = graph(
        folder,
        root=tmp_path,
        model=kind,
        store=StoreName.diskgnn,
        device_mb=1 / 1024,
        num_workers=2,
    )
    model, batches = task.model(), task.batches(mesh(0, 2), 0)
    batch = next(batches)
    batches.close()
    assert len(batch["table"]) > 0
    with no_waits():
        task.loss(model, batch).backward()


@pytest.mark.parametrize(
    "waiting",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.repeat_interleave(x.long()),
    ],
)
def test_waits_are_found(waiting: Any) -> None:
    """By what the test above rests on."""
    with no_waits(), pytest.raises(AssertionError, match="the host would wait for"):
        waiting(torch.arange(3.0))
