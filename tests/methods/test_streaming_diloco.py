"""What is particular to Streaming DiLoCo: its schedule, its layers, and when it is DiLoCo."""

import itertools
import random
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

import co2
from co2.errors import ConfigError
from co2.methods.streaming_diloco import StreamingDiLoCo, layer, strided, sync_step
from tests.methods import problem
from tests.methods.driver import SETTINGS, Session, assert_same, trajectory
from tests.reference import REFERENCES
from tests.reference.replica import Replica
from tests.workers import everybody, replicas

TAU = 6
EXCHANGES = ("full", "int8", "int4")
OUTER = {"outer_lr": 2.0, "outer_momentum": 0.0}
TABLE: dict[tuple[int, float], tuple[tuple[float, ...], tuple[float, ...]]] = {
    (0, 0.0): ((-11, -35, -59), (-23, -47)),
    (0, 0.5): ((-8, -24.5, -40.25), (-17, -32)),
    (0, 1.0): ((-5, -17, -29), (-11, -23)),
    (1, 0.0): ((-7, -27, -47), (-19, -39)),
    (1, 0.5): ((-6, -21.5, -35.75), (-15, -29)),
    # fragment 0's first sync would have started at step -1: only the second finds a mean, that of
    # step 5, where fragment 0 is at -9 and d = 10; step 11: -23 and d = 4
    (4, 0.0): ((-5, -19, -27), (-7, -15)),
}
"""(delay, mixing) → the two fragments' weights after their syncs at steps 3, 9, 15 and 6, 12, with
start 1, inner rate 1, gradient 2 and outer SGD of rate 2."""


def build() -> tuple[nn.Module, SGD]:
    """Two layers of one weight each, at 1."""
    ones = [torch.ones(1, dtype=torch.float64) for _ in range(2)]
    model = nn.ParameterList([nn.Parameter(one) for one in ones])
    return model, SGD(model.parameters(), lr=1.0)


def backward(model: nn.Module, step: int = 0) -> None:
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, 2.0)


def values(model: nn.Module) -> tuple[float, ...]:
    return tuple(weight.item() for weight in model.parameters())


def expected(case: tuple[int, float]) -> list[tuple[float, ...]]:
    """After each of 15 steps: between its syncs a weight moves by -2 a step."""
    after = [dict(zip(range(first, 16, TAU), TABLE[case][p], strict=True))
             for p, first in ((0, 3), (1, 6))]  # fmt: skip
    history, weights = [], [1.0, 1.0]
    for step in range(1, 16):
        weights = [after[p].get(step, weights[p] - 2) for p in range(2)]
        history.append(tuple(weights))
    return history


@replicas(2)
@pytest.mark.parametrize("case", TABLE, ids=str)
def test_the_table(case: tuple[int, float]) -> None:
    model, optimizer = build()
    delay, mixing = case
    config = StreamingDiLoCo.Config(tau=TAU, fragments=2, delay=delay, mixing=mixing, **OUTER)
    method = StreamingDiLoCo(config)
    method.prepare(model, optimizer, co2.Mesh.world())
    for weights in expected(case):
        backward(model)
        method.step()
        assert values(model) == weights
    method.flush()


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_the_table_by_the_reference(case: tuple[int, float]) -> None:
    replicas = [Replica(*build(), backward, lambda optimizer, step: None) for _ in range(2)]
    delay, mixing = case
    steps = REFERENCES["streaming_diloco"](
        replicas, tau=TAU, fragments=2, delay=delay, mixing=mixing, **OUTER
    )
    for weights in expected(case):
        next(steps)
        assert [values(replica.model) for replica in replicas] == [weights] * 2


def synced_after(rank: int, world: int, pairs: list[tuple[int, int]]) -> list[list[list[int]]]:
    """By pair and fragment: the steps of two rounds after which its outer weights have changed."""
    found = []
    for tau, fragments in pairs:
        model, optimizer = problem.build_drift([2] * fragments)
        config = {"tau": tau, "fragments": fragments, "delay": 0}
        method = StreamingDiLoCo(StreamingDiLoCo.Config(**config))
        method.prepare(model, optimizer, co2.Mesh.world())
        steps: list[list[int]] = [[] for _ in range(fragments)]
        for step in range(1, 2 * tau + 1):
            before = [fragment.outer.clone() for fragment in method.fragments]
            problem.backward_drift(model, step, rank)
            method.step()
            for number, fragment in enumerate(method.fragments):
                if not torch.equal(fragment.outer, before[number]):
                    steps[number].append(step)
        method.flush()
        found.append(steps)
    return found


PAIRS = [(tau, fragments) for tau in range(1, 13) for fragments in range(1, tau + 1)]


def test_no_two_fragments_share_a_step() -> None:
    for (tau, fragments), steps in zip(PAIRS, synced_after(0, 1, PAIRS), strict=True):
        together = [step for own in steps for step in own]
        assert len(together) == len(set(together)) == 2 * fragments, (tau, fragments)
        for number, (first, second) in enumerate(steps):
            assert second == first + tau and first % tau == sync_step(number, tau, fragments)
        firsts = [first for first, _ in steps]
        assert firsts == sorted(firsts) and firsts[-1] == tau
        if tau % fragments == 0:
            assert firsts == list(range(tau // fragments, tau + 1, tau // fragments))
        apart = {b - a for a, b in itertools.pairwise(firsts)}
        assert apart <= {tau // fragments, -(-tau // fragments)}, "as even as whole steps can be"


@replicas(3)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_one_fragment_without_delay_and_mixing_is_diloco(
    rank: int, world: int, optimizer: str
) -> None:
    outer = {"tau": 3, "outer_lr": 0.7, "outer_momentum": 0.6}
    one = {**outer, "fragments": 1, "delay": 0, "mixing": 0.0}
    streaming = trajectory(rank, world, "streaming_diloco", one, optimizer)
    assert_same(streaming, trajectory(rank, world, "diloco", outer, optimizer))


@replicas(4)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_outer_weights_are_bit_for_bit_alike(rank: int, exchange: str) -> None:
    """Local weights never are, while some of them are mixed in."""
    session = Session(
        rank, "streaming_diloco", {**SETTINGS["streaming_diloco"], "exchange": exchange}
    )
    history = []
    for _ in range(15):
        session.step()
        history.append([f.outer.clone() for f in session.method.fragments])  # type: ignore[attr-defined]
    session.method.flush()
    assert_same(everybody(history), [history] * 4)
    assert not torch.equal(history[0][0], history[-1][0])


@replicas(3)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_without_mixing_replicas_are_alike_after_a_sync(
    rank: int, world: int, exchange: str
) -> None:
    """Of one fragment, without delay, in all that is trained."""
    settings = {"tau": 3, "fragments": 1, "delay": 0, "mixing": 0.0, "exchange": exchange}
    names = [name for name, _ in problem.Net().named_parameters() if name != "unknown"]
    history = trajectory(rank, world, "streaming_diloco", settings)
    first, *others = everybody([[state[name] for name in names] for state in history])
    for other in others:
        assert_same(other[3::3], first[3::3])
        assert not torch.equal(other[4][0], first[4][0])


@replicas(3)
def test_a_quantized_exchange_may_take_its_time(rank: int, world: int) -> None:
    """Collectives that take up to 20 ms, others on each replica, beside steps that take one."""
    settings = {**SETTINGS["streaming_diloco"], "delay": 2, "exchange": "int8"}
    expected = trajectory(rank, world, "streaming_diloco", settings)
    source = random.Random(rank)

    def slowed(collective: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(source.random() / 50)
            return collective(*args, **kwargs)

        return call

    names = ("all_to_all_single", "all_gather_into_tensor")
    with patch.multiple(dist, **{name: slowed(getattr(dist, name)) for name in names}):
        for _ in range(3):
            assert_same(trajectory(rank, world, "streaming_diloco", settings), expected)


def quantized(rank: int, exchange: str, tau: int) -> tuple[Tensor, float]:
    """Weights after 240 steps of drift, of different gradients on each replica; and the bytes."""
    model, optimizer = problem.build_drift([300, 7, 700])
    outer = {"outer_lr": 1.0, "outer_momentum": 0.0}
    config = {"tau": tau, "fragments": 2, "delay": 1, "mixing": 0.0, "exchange": exchange, **outer}
    method = StreamingDiLoCo(StreamingDiLoCo.Config(**config))
    method.prepare(model, optimizer, co2.Mesh.world())
    for step in range(240):
        problem.backward_drift(model, step, rank)
        method.step()
    with method.consensus():
        weights = torch.cat([weight.detach().clone() for weight in model.parameters()])
    method.flush()
    return weights, method.stats().bytes_sent


@replicas(2)
def test_quantized_exchange_loses_nothing_for_good(rank: int) -> None:
    """What one rounding leaves comes with the next: after few syncs the weights are as far from
    those of the full exchange as after many, and the bytes are a quarter and an eighth."""
    apart, sent = {}, {}
    for tau in (40, 4):
        full, sent["full"] = quantized(rank, "full", tau)
        for exchange in ("int8", "int4"):
            weights, sent[exchange] = quantized(rank, exchange, tau)
            apart[exchange, tau] = (weights - full).norm().item()
    for exchange in ("int8", "int4"):
        assert 0 < apart[exchange, 4] < 1.5 * apart[exchange, 40]
    assert apart["int8", 4] < 0.1 * apart["int4", 4]
    # A vector in fp64 is 8 bytes an element; there are scales for the three tensors, too.
    assert sent["full"] / 8 <= sent["int8"] < 1.1 * sent["full"] / 8
    assert sent["full"] / 16 <= sent["int4"] < 1.15 * sent["full"] / 16


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("transformer.h.3.attn.bias", "transformer.h.3"),
        ("layer1.0.downsample.1.weight", "layer1.0"),
        ("0.weight", "0"),
        ("blocks.10", "blocks.10"),
        ("wte.weight", "wte.weight"),
        ("scale", "scale"),
    ],
)
def test_layers(name: str, expected: str) -> None:
    assert layer(name) == expected


class Small(nn.Module):
    """In the model's order: enter, h.0 (three parameters, one frozen), h.1, leave (two layers)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(2, 2, bias=False)
        self.h = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)])
        self.leave = nn.Linear(2, 2)
        self.h[0][1].bias.requires_grad_(False)


def test_layers_are_dealt_out_in_turn() -> None:
    model = Small()
    optimizer = SGD(reversed(list(model.parameters())), lr=1.0)  # its order does not matter
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [[names[id(p)] for p in part] for part in strided(model, optimizer, 2)]
    assert found == [
        ["enter.weight", "h.1.weight", "h.1.bias", "leave.bias"],
        ["h.0.0.weight", "h.0.0.bias", "h.0.1.weight", "leave.weight"],
    ]


def test_more_fragments_than_layers_are_refused() -> None:
    model, optimizer = problem.build_drift([3, 4])
    method = StreamingDiLoCo(StreamingDiLoCo.Config(fragments=3))
    with pytest.raises(ConfigError, match=r"^streaming_diloco.fragments=3: must be at most 2, .*$"):
        method.prepare(model, optimizer, co2.Mesh.world())
