"""What is special to the methods that exchange gradients at every step: AllReduce, ACCO, DeMo,
1-bit Adam and 0/1 Adam. What the tables expect was typed, not computed by the code."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import SGD

import co2
from co2.comm import dct_mean, flat
from co2.config import CommConfig
from co2.errors import ConfigError
from co2.methods import METHODS
from co2.methods.onebit_adam import OneBitAdam
from co2.methods.zero_one_adam import ZeroOneAdam, interval
from tests.engine.test_memory import LargestAllocation
from tests.methods import problem
from tests.methods.driver import ADAM, SETTINGS, Session, assert_same, trajectory
from tests.reference.signs import exchanges, refreshes
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
    net = Branches()  # where gradients are added up, at the second micro-batch
    model = METHODS["allreduce"]().prepare(net, SGD(net.parameters(), lr=0.1), co2.Mesh.world())
    model(torch.ones(2, 3), 0).backward()
    with pytest.raises(ConfigError, match=REFUSED.format(1)):
        model(torch.ones(2, 3), 0)


# DeMo.

SHAPES = [(8, 12), (12,), (6, 4, 3, 2), (), (0,), (7, 5), (16, 12), (31,)]


def method_of(optimizer: SGD, weights: list[nn.Parameter], **fields: Any) -> co2.DeMo:
    method = co2.DeMo(co2.DeMo.Config(**fields))
    method.prepare(nn.ParameterList(weights), optimizer, co2.Mesh.world())
    return method


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


def test_where_nothing_is_sent_nothing_moves() -> None:
    """But for weight decay."""
    weight = nn.Parameter(torch.ones(4, 4))
    method = method_of(SGD([weight], lr=0.5, weight_decay=0.5), [weight])
    method.step()
    assert_same(weight.detach(), torch.full((4, 4), 0.75))


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


# 1-bit Adam and 0/1 Adam.

STEPS = 15


@replicas(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_until_the_freeze_it_is_allreduce(
    rank: int, world: int, optimizer: str, dtype: torch.dtype
) -> None:
    """Bit for bit: means over two are exact."""
    ddp = trajectory(rank, world, "allreduce", {}, optimizer, dtype)
    for freeze_step in (STEPS - 1, STEPS):
        settings = {"freeze_step": freeze_step}
        own = trajectory(rank, world, "onebit_adam", settings, optimizer, dtype)
        assert_same(own[: freeze_step + 1], ddp[: freeze_step + 1])
        assert torch.equal(own[-1]["scale"], ddp[-1]["scale"]) == (freeze_step == STEPS)


def test_intervals_that_the_learning_rate_drives() -> None:
    def found(*shares: float, longest: int = 16) -> list[int]:
        return [interval(longest, share, 0, None) for share in shares]

    assert found(1, 0.51, 0.5, 0.26, 0.25, 0.1, 1 / 16, 1e-9, 0) == [1, 1, 2, 2, 4, 8, 16, 16, 16]
    assert found(1, 0.5, 0.25, 0, longest=3) == [1, 2, 3, 3]
    assert interval(16, 0.25, 7, 3) == 4  # a number of steps counts where there is one

    def rate(step: int) -> float:  # a warm-up, then a share of 0.9 a step
        return 0.25 * (step + 1) if step < 4 else 0.9 ** (step - 3)

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=1.0)
    config = ZeroOneAdam.Config(freeze_step=4, max_interval=8)
    method = ZeroOneAdam(config)
    method.prepare(torch.nn.ParameterList([weight]), optimizer, co2.Mesh.world())
    steps = []
    for step in range(60):
        optimizer.param_groups[0]["lr"] = rate(step)
        weight.grad = torch.randn(3)
        due = method.next_sync
        method.step()
        if due == step:
            steps.append(step)
    method.flush()
    assert steps == [t for t in exchanges(4, None, 8, rate) if t < 60]
    assert steps[:6] == [0, 1, 2, 3, 4, 5] and steps[-1] - steps[-2] == 8


def test_known_schedules() -> None:
    assert refreshes(20, 2) == [0, 1, 2, 4, 6, 10, 14]
    assert refreshes(9, 1) == [0, 1, 3, 7]
    assert [t for t in exchanges(9, 1, 4) if t < 24] == [*range(10), 10, 12, 16, 20]
    assert [t for t in exchanges(4, 2, 4) if t < 24] == [0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 20]


@replicas()
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ADAM)
def test_what_has_no_gradient_until_the_freeze_stays(rank: int, world: int, name: str) -> None:
    """Its v is 0: a sign divided by epsilon alone would carry it away. One weight never has a
    gradient; the rows of another are seen one by one, after the freeze also one that was not
    before."""
    generator = torch.Generator().manual_seed(rank)
    weights = [torch.nn.Parameter(torch.ones(size)) for size in ((5,), (3,), (4, 2))]
    optimizer = torch.optim.AdamW(weights, lr=0.1, weight_decay=0.0)
    method = co2.METHODS[name](co2.METHODS[name].Config(**SETTINGS[name]))
    method.prepare(torch.nn.ParameterList(weights), optimizer, co2.Mesh.world())
    assert isinstance(method, OneBitAdam | ZeroOneAdam)
    notices: list[str] = []
    for step in range(STEPS):
        weights[0].grad = torch.randn(5, generator=generator)
        weights[0].grad[4] *= 1e-6  # seen, but as good as unseen beside the others
        weights[2].grad = torch.zeros(4, 2)
        row = step % 2 if step < 4 else step % 3
        weights[2].grad[row] = torch.randn(2, generator=generator)
        method.step()
        notices += method.notices()
    assert torch.equal(weights[1], torch.ones(3))
    assert torch.equal(weights[2][2:], torch.ones(2, 2))
    assert not weights[0].eq(1).any() and not weights[2][:2].eq(1).any()
    for weight in weights:
        assert weight.sub(1).abs().max() < 3  # no step is much longer than Adam's
    [notice] = notices
    assert notice.startswith("variance frozen") and "7 of 16 elements have no gradient" in notice
    still = method.v == 0
    assert still.sum() == 3 + 4
    assert not method.exchange.worker_error[still].any()
    own = method.exchange._own
    assert not method.exchange.server_error[still[own]].any()
    if name == "onebit_adam":
        assert not method.m[still].any()


@replicas(2)
def test_a_learning_rate_of_0_leaves_replicas_alike(rank: int, world: int) -> None:
    """A learning rate of 0 in some steps, as of a warm-up that begins there."""
    session = Session(rank, "zero_one_adam", {**SETTINGS["zero_one_adam"], "kappa": 1})
    method = session.method
    assert isinstance(method, ZeroOneAdam)
    rates = problem.set_lr

    def paused(optimizer: torch.optim.Optimizer, step: int) -> None:
        rates(optimizer, step)
        for group in optimizer.param_groups[:2]:
            group["lr"] *= step not in (0, 2, 6)

    with patch.object(problem, "set_lr", paused):
        for step in range(STEPS):
            session.step()
            if method.next_sync == step + method.interval:
                for vector in (method.m, method.flat.copy()):
                    assert vector.isfinite().all()
                    assert_same(everybody(vector), [vector] * world)
