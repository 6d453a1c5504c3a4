"""What is special to the methods that exchange gradients at every step: AllReduce, ACCO and DeMo.
Everything expected in their tables was typed, not computed by the code."""

import copy
import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import co2
from co2.comm import dct_mean, flat
from co2.config import CommConfig, OptimConfig, Optimizer
from co2.errors import ConfigError
from co2.methods import METHODS
from tasks.shared.optimizer import make_optimizer
from tests.engine.test_memory import LargestAllocation
from tests.methods import problem
from tests.methods.driver import assert_same
from tests.workers import everybody, replicas

# AllReduce trains a model of which some parameters take no part, where it is told to.


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(3, 1) for _ in range(2))

    def forward(self, x: torch.Tensor, taken: int) -> torch.Tensor:
        return self.branches[taken](x).square().mean()


def train(rank: int, find: bool, first: int = 0) -> nn.Module:
    net = Branches()
    optimizer = SGD(net.parameters(), lr=0.1)
    method = METHODS["allreduce"](comm=CommConfig(find_unused_parameters=find))
    model = method.prepare(net, optimizer, co2.Mesh.world())
    for step in range(first, first + 4):
        model(torch.full((2, 3), float(rank + 1)), step % 2).backward()
        method.step()
        optimizer.zero_grad()
    return net


@replicas(2)
def test_each_step_takes_another_branch(rank: int) -> None:
    found, net = train(rank, True), Branches()
    optimizer = SGD(net.parameters(), lr=0.1)
    for step in range(4):
        losses = [net(torch.full((2, 3), float(other + 1)), step % 2) for other in range(2)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close([*found.parameters()], [*net.parameters()])
    assert_same(*everybody([weight.detach() for weight in found.parameters()]))


REFUSED = (
    r"comm\.find_unused_parameters=False: the loss did not depend on branches\.{}\.weight, so DDP "
    r"has not averaged .*CommConfig\(find_unused_parameters=True\)"
)


@replicas(2)
@pytest.mark.parametrize("first", [0, 1])
def test_else_it_is_refused(rank: int, first: int) -> None:
    """At the first step, before the optimizer moves a weight."""
    with pytest.raises(ConfigError, match=REFUSED.format(1 - first)):
        train(rank, False, first)


@replicas(2)
def test_where_gradients_are_added_up() -> None:
    """It is at the second micro-batch of the first step."""
    net = Branches()
    method = METHODS["allreduce"]()
    model = method.prepare(net, SGD(net.parameters(), lr=0.1), co2.Mesh.world())
    model(torch.ones(2, 3), 0).backward()
    with pytest.raises(ConfigError, match=REFUSED.format(1)):
        model(torch.ones(2, 3), 0)


# ACCO. The weight starts at `start`; a call's gradient is `slope` times the weight plus the entry
# for the replica and the half. With a slope of 0 the pipeline, once filled, is plain training.

CALLS = 7


@dataclass
class Case:
    name: str
    halves: list[tuple[float, float]]
    """By replica: the gradients of its first and of its second halves."""
    expected: list[float]
    """The weight after each call: x_0, x̃_1, x_1, x̃_2, x_2, …"""
    start: float = 0.0
    slope: float = 0.0
    lr: tuple[float, ...] = (1.0,) * CALLS
    momentum: float = 0.0


CASES = [
    Case("constant", [(1, 1)], [0, -1, -1, -2, -2, -3, -3]),
    Case("the mean of two halves", [(1, 3)], [0, -1, -2, -3, -4, -5, -6]),
    Case("the mean of two replicas", [(1, 0), (3, 8)], [0, -2, -3, -5, -6, -8, -9]),
    Case("the rate of the call", [(1, 1)], [0, -0.5, -2, -5, -6], lr=(1.0, 0.5, 2.0, 3.0, 4.0)),
    # the buffer is 1, 3/2, 7/4; a step that was not undone would count twice
    Case("momentum", [(1, 1)], [0, -1, -1, -2.5, -2.5, -4.25, -4.25], momentum=0.5),
    # g~ = 10, 5, 3.5, 2.5 at x~ = 8, 3, 1.5, 0.5; g = 6, 2, 0.25 at x = 8, 4, 2.25
    Case("gradients are taken where the weights are", [(2, -2)],
         [8, 3, 4, 1.5, 2.25, 0.5, 1.3125], start=8.0, slope=1.0, lr=(0.5,) * CALLS),
]  # fmt: skip


@replicas()
@pytest.mark.parametrize(("world", "case"), [(len(case.halves), case) for case in CASES], ids=str)
def test_acco_by_hand(rank: int, world: int, case: Case) -> None:
    weight = nn.Parameter(torch.full((1,), case.start, dtype=torch.float64))
    optimizer = SGD([weight], lr=1.0, momentum=case.momentum)
    method = co2.ACCO()
    method.prepare(nn.ParameterList([weight]), optimizer, co2.Mesh.world())
    history = []
    for call in range(len(case.expected)):
        optimizer.param_groups[0]["lr"] = case.lr[call]
        weight.grad = case.slope * weight.detach() + case.halves[rank][call % 2]
        method.step()
        optimizer.zero_grad()
        history.append(weight.item())
    method.flush()
    assert history == pytest.approx(case.expected, abs=1e-12)


@replicas(2)
def test_gradients_that_ignore_the_weights_make_plain_training(rank: int) -> None:
    """With AdamW too: x_t is its t-th step with the means of both halves and all replicas, and its
    count of steps."""
    (model, _), (plain, _) = problem.build_drift([3, 5]), problem.build_drift([3, 5])
    optimizer, alone = (AdamW(m.parameters(), lr=0.1, weight_decay=0.1) for m in (model, plain))
    method = co2.ACCO()
    method.prepare(model, optimizer, co2.Mesh.world())
    for call in range(CALLS):
        problem.backward_drift(model, call, rank)
        method.step()
        if call % 2:
            continue
        torch.testing.assert_close([*model.parameters()], [*plain.parameters()])
        means = [torch.zeros_like(weight) for weight in plain.parameters()]
        for half, other in product((call, call + 1), range(2)):
            problem.backward_drift(plain, half, other)
            for total, weight in zip(means, plain.parameters(), strict=True):
                total += weight.grad / 4  # type: ignore[operator]
        for total, weight in zip(means, plain.parameters(), strict=True):
            weight.grad = total
        alone.step()
    method.flush()
    assert optimizer.state_dict()["state"][0]["step"] == (CALLS - 1) // 2


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_an_estimate_leaves_the_optimizer_as_it_was(name: str) -> None:
    """From the first, which finds no state, on."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    rate = 0.1 if name == "sgd" else 0.01
    optimizer = make_optimizer(model, OptimConfig(name=Optimizer[name], lr=rate, momentum=0.9))
    method = co2.ACCO()
    method.prepare(model, optimizer, co2.Mesh.world())
    for call in range(CALLS):
        model(torch.randn(3, 4)).square().sum().backward()
        before = copy.deepcopy(optimizer.state_dict())
        weights = [weight.detach().clone() for weight in model.parameters()]
        method.step()
        optimizer.zero_grad()
        if call % 2:
            assert_same(optimizer.state_dict(), before)
            assert not torch.equal(weights[0], next(model.parameters()))
    assert optimizer.state_dict()["state"]
    method.flush()


# DeMo: blocks, their transform, what is sent of them, and steps on the back of an envelope.

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


ROOT = math.sqrt(0.5)
ZEROS = [0.0, 0.0]
STEPPED: list[tuple[float, list[list[list[float]]], list[list[float]]]] = [
    # Of (3, 1) the wave (1, 1) has the coefficient √8, and (1, −1) √2. Then that is the largest:
    # what is left of it, √2/2, beside 0.
    (0.5, [[[3.0, 1.0], ZEROS, ZEROS]], [[-1.0, -1.0], [-2.0, 0.0], [-2.0, 0.0]]),
    # Replica 0 sends 4 of (1, 1)/√2, replica 1 −1 of (1, −1)/√2, and replica 2 as replica 0, but
    # −3: the mean of the first wave is ½. Had all counted, it would be ⅓, as is −1/3 of the second;
    # now −1 outweighs it.
    (0.9, [[[4 * ROOT, 4 * ROOT]], [[-ROOT, ROOT]], [[-3 * ROOT, -3 * ROOT]]], [[1.0, -1.0]]),
    # Of equal ones the first is sent.
    (1 - 2**-30, [[[2.0, 0.0], ZEROS]], [[-1.0, -1.0], [-2.0, 0.0]]),
]
"""Decay, gradients of each replica in each step, and the weight after each, at a rate of 1."""


@replicas()
@pytest.mark.parametrize(
    ("world", "case"), [(len(case[1]), case) for case in STEPPED], ids=["left", "mean", "equal"]
)
def test_demo_by_hand(rank: int, world: int, case: tuple[float, Any, Any]) -> None:
    """Of a block the largest coefficient is sent, and the rest stays."""
    decay, gradients, expected = case
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    method = method_of(SGD([weight], lr=1.0), [weight], decay=decay, top_k=1)
    history = []
    for gradient in gradients[rank]:
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        method.step()
        history.append(weight.tolist())
    method.flush()
    assert history == expected


def test_where_nothing_is_sent_nothing_moves() -> None:
    """But for weight decay."""
    weight = nn.Parameter(torch.ones(4, 4))
    method = method_of(SGD([weight], lr=0.5, weight_decay=0.5), [weight])
    method.step()
    assert_same(weight.detach(), torch.full((4, 4), 0.75))


@replicas(3)
def test_when_all_is_sent_it_is_sgd_of_the_means_signs(rank: int, world: int) -> None:
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
    assert_same(weight.detach(), other.detach())


@replicas()
@pytest.mark.parametrize("world", [2, 3])
def test_replicas_stay_alike_and_count_their_bytes(rank: int, world: int) -> None:
    """On a worker of 1 + rank threads."""
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
    finally:
        torch.set_num_threads(1)
    found = [weight.detach() for weight in weights]
    assert_same(everybody(found), [found] * world)
    # Three of each of 6 + 3 + 12 + 12 blocks, and all 1 + 35 + 31 of one element, at six bytes,
    # rounded to whole values.
    message = 4 * math.ceil(6 * (3 * (6 + 3 + 12 + 12) + 67) / 4)
    assert method.exchange.sent.numel() == message
    assert method.stats().bytes_sent == 5 * (world - 1) * message


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
