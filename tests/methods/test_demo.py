"""DeMo: blocks, their transform, what is sent of them, and steps on the back of an envelope."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import co2
from co2.comm import dct_mean, flat
from co2.config import CommConfig, CommDevice, Precision
from co2.errors import ConfigError
from tests.engine.test_memory import LargestAllocation
from tests.methods.driver import assert_same
from tests.workers import Pool

SHAPES: tuple[tuple[int, ...], ...] = (
    (8, 12),
    (12,),
    (6, 4, 3, 2),
    (),
    (0,),
    (7, 5),
    (16, 12),
    (31,),
)


def method_of(optimizer: SGD, weights: list[nn.Parameter], **fields: Any) -> co2.DeMo:
    method = co2.DeMo(co2.DeMo.Config(**fields))
    method.prepare(nn.ParameterList(weights), optimizer, co2.Mesh.world())
    return method


@pytest.mark.parametrize("size", [1, 2, 5, 8, 64])
def test_waves_are_orthonormal(size: int) -> None:
    found = dct_mean.dct_matrix(size)
    torch.testing.assert_close(found @ found.T, torch.eye(size, dtype=torch.float64))
    constant = torch.ones(size, dtype=torch.float64)
    expected = torch.zeros_like(constant)
    expected[0] = math.sqrt(size)
    torch.testing.assert_close(found @ constant, expected)
    if size % 2:  # odd waves cross 0 in the middle, exactly
        assert (found[1::2, size // 2] == 0).all()


@pytest.mark.parametrize("most", [1, 24, 100, 10**6])
def test_blocks_are_all_of_every_tensor(most: int) -> None:
    """Cut and put together again, whatever the size of a piece; vectors, scalars and tensors of
    four dimensions too, and such as are not contiguous."""
    tensors = [torch.randn(shape) for shape in SHAPES]
    tensors[2] = tensors[2].contiguous(memory_format=torch.channels_last)
    again = [torch.zeros_like(tensor) for tensor in tensors]
    pieces = list(dct_mean.cut(SHAPES, 4, 3, most))
    for piece in pieces:
        for strip in piece.strips:
            blocks = strip.blocks_of(tensors[strip.tensor], piece)
            assert blocks.shape[1:] == piece.shape[1:]
            assert len(blocks) == strip.blocks.stop - strip.blocks.start
            strip.write(again[strip.tensor], blocks, piece)
    assert_same(again, tensors)
    numel = sum(tensor.numel() for tensor in tensors)
    spans = [piece.elements for piece in pieces]
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == numel
    assert {(p.height, p.width) for p in pieces} == {(4, 4), (1, 4), (3, 4), (1, 1)}
    largest = max(math.prod(piece.shape) for piece in pieces)
    assert largest <= max(most, 3 * 24)  # the widest row of blocks


def test_a_block_is_a_square_of_neighbours() -> None:
    matrix = torch.arange(8 * 12.0).view(8, 12)
    (piece,) = dct_mean.cut([(8, 12)], 4, 3, 10**6)
    blocks = piece.strips[0].blocks_of(matrix, piece)
    assert_same(blocks[4], matrix[4:8, 4:8].contiguous())


def stepped(
    rank: int, world: int, gradients: list[list[list[float]]], decay: float
) -> list[Tensor]:
    """A weight of a block after each step, the first coefficient of which is sent, at a rate of 1.

    Args:
        gradients: of each replica in each step.
    """
    weight = nn.Parameter(torch.zeros(len(gradients[0][0]), dtype=torch.float64))
    method = method_of(SGD([weight], lr=1.0), [weight], decay=decay, top_k=1)
    history = []
    for gradient in gradients[rank]:
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        method.step()
        history.append(weight.detach().clone())
    method.flush()
    return history


def test_what_is_not_sent_stays(workers: Pool) -> None:
    """Of (3, 1) the wave (1, 1) has the coefficient √8, and (1, −1) √2. Then that is the largest:
    what is left of it, √2/2, beside 0."""
    zeros = [0.0, 0.0]
    (found,) = workers.run(stepped, 1, [[[3.0, 1.0], zeros, zeros]], 0.5)
    expected = [[-1.0, -1.0], [-2.0, 0.0], [-2.0, 0.0]]
    assert torch.stack(found).tolist() == expected


def test_a_coefficient_is_the_mean_of_those_that_sent_it(workers: Pool) -> None:
    """Replica 0 sends 4 of (1, 1)/√2, replica 1 −1 of (1, −1)/√2, and replica 2 as replica 0, but
    −3: the mean of the first wave is ½. Had all counted, it would be ⅓, as is −1/3 of the second;
    now −1 outweighs it."""
    root = math.sqrt(0.5)
    one, two, three = [4 * root, 4 * root], [-root, root], [-3 * root, -3 * root]
    for found in workers.run(stepped, 3, [[one], [two], [three]], 0.9):
        assert found[0].tolist() == [1.0, -1.0]


def test_of_equal_ones_the_first_is_sent(workers: Pool) -> None:
    (found,) = workers.run(stepped, 1, [[[2.0, 0.0], [0.0, 0.0]]], 1 - 2**-30)
    assert torch.stack(found).tolist() == [[-1.0, -1.0], [-2.0, 0.0]]


def test_where_nothing_is_sent_nothing_moves() -> None:
    """But for weight decay."""
    weight = nn.Parameter(torch.ones(4, 4))
    method = method_of(SGD([weight], lr=0.5, weight_decay=0.5), [weight])
    method.step()
    assert_same(weight.detach(), torch.full((4, 4), 0.75))


def signed(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """All is sent, nothing stays: the weight, and one that SGD moves by the mean's signs."""
    generators = [torch.Generator().manual_seed(number) for number in range(world)]
    weight, other = (nn.Parameter(torch.ones(6, 10, dtype=torch.float64)) for _ in range(2))
    method = method_of(SGD([weight], lr=0.1, weight_decay=0.1), [weight], decay=0.0, top_k=99)
    plain = SGD([other], lr=0.1, weight_decay=0.1)
    for _ in range(5):
        gradients = [torch.randn(6, 10, generator=one, dtype=torch.float64) for one in generators]
        weight.grad = gradients[rank].clone()
        method.step()
        other.grad = torch.stack(gradients).mean(dim=0).sign()
        plain.step()
    method.flush()
    return weight.detach(), other.detach()


def test_when_all_is_sent_it_is_sgd_of_the_means_signs(workers: Pool) -> None:
    for weight, other in workers.run(signed, 3):
        assert_same(weight, other)


def trained(rank: int, world: int) -> tuple[list[Tensor], float, int]:
    """Weights on a worker of 1 + rank threads, bytes sent, and those of a message."""
    torch.set_num_threads(1 + rank)
    try:
        weights = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        method = method_of(SGD(weights, lr=0.1), weights, top_k=3, block=4)
        for step in range(5):
            generator = torch.Generator().manual_seed(10 * step + rank)
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            method.step()
        method.flush()
        return (
            [w.detach() for w in weights],
            method.stats().bytes_sent,
            method.exchange.sent.numel(),
        )
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("world", [2, 3])
def test_replicas_stay_alike_and_count_their_bytes(workers: Pool, world: int) -> None:
    (weights, *_), *others = found = workers.run(trained, world)
    for other, *_ in others:
        assert_same(other, weights)
    # Three of each of 6 + 3 + 12 + 12 blocks, and all 1 + 35 + 31 of one element, at six bytes,
    # rounded to whole values.
    message = 4 * math.ceil(6 * (3 * (6 + 3 + 12 + 12) + 67) / 4)
    for _, sent, length in found:
        assert length == message and sent == 5 * (world - 1) * message


def test_a_step_makes_no_temporary_of_model_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flat._CHUNK, "cpu", 1024)
    weights = [nn.Parameter(torch.randn(64, 256)), nn.Parameter(torch.randn(4096))]
    method = method_of(SGD(weights, lr=0.1), weights, block=16, top_k=4)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        with LargestAllocation() as seen:
            method.step()
    assert seen.operations > 0 and seen.largest <= 16 * 256


@pytest.mark.parametrize("most", [10**4, 10**6])
def test_operators_do_not_grow_with_the_pieces_of_a_kind(most: int) -> None:
    """Tensors whose blocks have one shape share pieces."""
    pieces = list(dct_mean.cut([(64, 64)] * 6 + [(64,)] * 6, 64, 32, most))
    assert len(pieces) == (2 if most == 10**6 else 4)


@pytest.mark.parametrize(
    ("key", "comm"),
    [
        ("comm.dtype=bf16", CommConfig(dtype=Precision.bf16)),
        ("comm.device=cpu", CommConfig(device=CommDevice.cpu)),
    ],
)
def test_a_wire_that_it_does_not_have_is_refused(key: str, comm: CommConfig) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: "):
        co2.DeMo(comm=comm)


@pytest.mark.parametrize("fields", [{"momentum": 0.9}, {"maximize": True}])
def test_another_optimizer_is_refused(fields: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.zeros(3))
    for optimizer in (SGD([weight], lr=0.1, **fields), torch.optim.AdamW([weight])):
        with pytest.raises(ConfigError, match=r"^optim.name=\w+: demo needs sgd"):
            method_of(optimizer, [weight])  # type: ignore[arg-type]
