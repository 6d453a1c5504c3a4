"""Sampled neighbourhoods, and the two models on them."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from tasks.graph.networks import Edges, GATLayer, GraphNetwork, Network, SAGELayer
from tasks.graph.sampling import Neighbourhood, Restricted, Topology
from tasks.shared.randomness import generator

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


def neighbours_of(edges: Edges) -> list[list[int]]:
    starts, sources = edges
    return [part.tolist() for part in sources.tensor_split(starts[1:-1])]


@pytest.fixture
def layer() -> tuple[Tensor, Edges]:
    """Five nodes, three of them targets, of which the second has no neighbours."""
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, (torch.tensor([0, 3, 3, 5]), torch.tensor([1, 3, 4, 0, 2]))


def test_sage_layer(layer: tuple[Tensor, Edges]) -> None:
    x, own = layer
    module = SAGELayer(4, 3).double()
    expected = []
    for node, neighbours in enumerate(neighbours_of(own)):
        mean = x[neighbours].mean(0) if neighbours else torch.zeros(4, dtype=torch.float64)
        expected.append(module.own(x[node]) + module.neighbours(mean))
    torch.testing.assert_close(module(x, own), torch.stack(expected))


@pytest.mark.parametrize("average", [False, True])
def test_gat_layer(layer: tuple[Tensor, Edges], average: bool) -> None:
    x, own = layer
    module = GATLayer(4, 6, heads=2, average=average).double()
    with torch.no_grad():
        module.bias.normal_()
    values = module.values(x).view(5, 2, -1)
    expected = []
    for node, neighbours in enumerate(neighbours_of(own)):
        seen = [*neighbours, node]
        heads = []
        for head in range(2):
            score = torch.stack(
                [
                    module.source[head] @ values[u, head] + module.target[head] @ values[node, head]
                    for u in seen
                ]
            )
            share = torch.where(score > 0, score, 0.2 * score).softmax(0)
            heads.append(share @ values[seen, head])
        made = torch.stack(heads)
        expected.append((made.mean(0) if average else made.flatten()) + module.bias)
    # The softmax is computed in fp32, whatever the weights are.
    torch.testing.assert_close(module(x, own), torch.stack(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", Network)
def test_gradients_reach_every_weight(kind: Network, topology: Topology) -> None:
    model = GraphNetwork(kind, (4, 8, 3), heads=2, dropout=0.5)
    whole = topology.neighbourhood(np.array([0, 3]), (2, 2), generator(0))
    own = [(torch.from_numpy(one.starts), torch.from_numpy(one.sources)) for one in whole.layers]
    logits = model(torch.randn(len(whole.nodes), 4), own)
    assert logits.shape == (2, 3)
    logits.logsumexp(1).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
