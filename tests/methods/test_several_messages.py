"""Many replicas send several messages, one after the other: what is received takes no more memory
than the vector, and the mean is that of one message."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import co2
from benchmarks.launches import of_gpt2
from co2.comm import dct_mean, sparse_mean
from co2.comm.background_mean import BackgroundMean
from co2.comm.sparse_mean import SparseMean, add_in_order, num_messages
from tests.methods.driver import assert_same
from tests.methods.network import Recorder
from tests.workers import replicas

SHAPES = [(50, 100), (9000,), (3,), (64, 64), (40, 300)]


def drawn(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def sparse(rank: int) -> list[Tensor]:
    """A mean and what is left over, after two rounds."""
    vectors = [torch.cat([part.flatten() for part in drawn(rank, step)]) for step in range(2)]
    mesh, sizes = co2.Mesh.world(), [part.numel() for part in drawn(rank, 0)]
    mean = BackgroundMean(sum(sizes), mesh, dtype=torch.float64)
    taken = SparseMean(sizes, mesh, mean, 0.1, 0.9)
    for vector in vectors:
        mean.buffer.copy_(vector)
        taken.start(mean.buffer)
        mean.wait()
    found = [mean.buffer.clone(), taken.error]
    mean.close()
    return found


def waves(rank: int) -> list[Tensor]:
    """Weights after two steps of DeMo, and its momentum, as a sum for each wave."""
    weights = [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in SHAPES]
    kind = co2.METHODS["demo"]
    method = kind(kind.Config(top_k=3, block=4))
    method.prepare(nn.ParameterList(weights), SGD(weights, lr=0.1), co2.Mesh.world())
    for step in range(2):
        for weight, gradient in zip(weights, drawn(rank, step), strict=True):
            weight.grad = gradient
        method.step()
    method.flush()
    return [weight.detach() for weight in weights]


@replicas(3)
@pytest.mark.parametrize("act", [sparse, waves])
def test_they_are_one(rank: int, act: Callable[[int], list[Tensor]]) -> None:
    found, counts = [], []
    for several in (1, 4):
        with (
            patch.multiple(sparse_mean, _PIECE=2 * 4096, num_messages=lambda *_, n=several: n),
            patch.multiple(dct_mean, _LEAST=100, num_messages=lambda *_, n=several: n),
            Recorder() as recorder,
        ):
            found.append(act(rank))
        counts.append(sum(call[1] == "all_gather_into_tensor" for call in recorder.log))
    assert_same(*found)
    assert counts[1] >= counts[0] + 2 * 2, counts


def test_as_many_as_the_memory_of_the_vector_asks_for() -> None:
    most = 1 << 30
    found = [num_messages(share * most, most) for share in (0.0, 0.99, 1.0, 1.01, 9.5)]
    assert found == [1, 1, 1, 2, 10] and num_messages(1e6, 1000) == 1


def test_of_one_place_the_values_are_added_in_their_order() -> None:
    """1 + 2⁻⁵³ + 2⁻⁵³ is 1 in fp64, and more in another order."""
    out, tiny = torch.zeros(2, dtype=torch.float64), 2.0**-53
    values = torch.tensor([1.0, tiny, tiny, tiny, tiny, 1.0], dtype=torch.float64)
    add_in_order(out, torch.tensor([0, 0, 0, 1, 1, 1]), values)
    assert out.tolist() == [1.0, 1 + 2 * tiny]


@pytest.mark.parametrize("name", ["demo", "sparseloco"])
def test_512_replicas_take_little_more_than_eight(name: str) -> None:
    """Of GPT-2 small: two words a parameter at most, and some launches for each message."""
    few, many = of_gpt2(name, 8), of_gpt2(name, 512)
    assert many.words <= few.words + 2
    assert many.collectives <= 12 and len(many.log) <= 2 * len(few.log) + 20 * many.collectives
