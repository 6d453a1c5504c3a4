"""Averaged moments on the back of an envelope: two replicas, one weight, gradients 1 and 3.

With β1 = β2 = ½ the moments after one step are m = ½, 3/2 and v = ½, 9/2; after two of the same
gradients ¾, 9/4 and ¾, 27/4. Everything expected here was typed, not computed by the code.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import co2
from co2.errors import ConfigError
from co2.methods import METHODS
from co2.methods.base import Method
from co2.methods.shared.moments import Moment
from tests.methods.driver import MOMENTS, SETTINGS, Session
from tests.workers import replicas

Pair = tuple[float, float]


def moments_of(
    rank: int, name: str, settings: dict[str, Any], gradients: list[float]
) -> list[Pair]:
    """m and v of a replica after each step, of one weight."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = AdamW([weight], lr=0.1, betas=(0.5, 0.5))
    method = METHODS[name](METHODS[name].Config(**settings))
    method.prepare(nn.ParameterList([weight]), optimizer, co2.Mesh.world())
    history = []
    for gradient in gradients:
        weight.grad = torch.full_like(weight, gradient)
        method.step()
        state = optimizer.state[weight]
        history.append((state["exp_avg"].item(), state["exp_avg_sq"].item()))
    method.flush()
    return history


CASES: list[tuple[str, dict[str, Any], list[list[Pair]]]] = [
    # after step 2 the mean of m = ¾, 9/4; after step 3 the mean of v = ⅞, 63/8
    (
        "desloc",
        {"tau": 5, "first_moment_every": 2, "second_moment_every": 3},
        [[(0.5, 0.5), (1.5, 0.75), (1.25, 4.375)], [(1.5, 4.5), (1.5, 6.75), (2.25, 4.375)]],
    ),
    # u is sent after step 2, and its mean 3/2 arrives after step 4: a quarter of what it adds
    (
        "mt_dao",
        {
            **{"tau": 2, "slow_beta": 0.5, "first_moment_every": 2, "second_moment_every": 9},
            "late_momentum": True,
        },
        [
            [(0.5, 0.5), (0.75, 0.75), (0.875, 0.875), (0.9375 + 0.1875, 0.9375)],
            [(1.5, 4.5), (2.25, 6.75), (2.625, 7.875), (2.8125 - 0.1875, 8.4375)],
        ],
    ),
    (
        "diloco",
        {"tau": 2, "average_moments": True},
        [[(0.5, 0.5), (1.5, 3.75)], [(1.5, 4.5), (1.5, 3.75)]],
    ),
    # sent after step 2, the means 3/2 and 15/4 arrive after step 3: the half of what they add
    (
        "co2_keep",
        {"tau": 2, "delay": 1, "average_moments": True},
        [
            [(0.5, 0.5), (0.75, 0.75), (0.875 + 0.375, 0.875 + 1.5)],
            [(1.5, 4.5), (2.25, 6.75), (2.625 - 0.375, 7.875 - 1.5)],
        ],
    ),
    # after step 4 a quarter of it: m = 15/16, 45/16 and v = 15/16, 135/16 without any mean
    (
        "co2",
        {"tau": 2, "average_moments": True},
        [
            [(0.5, 0.5), (0.75, 0.75), (0.875, 0.875), (0.9375 + 0.1875, 0.9375 + 0.75)],
            [(1.5, 4.5), (2.25, 6.75), (2.625, 7.875), (2.8125 - 0.1875, 8.4375 - 0.75)],
        ],
    ),
]


@replicas(2)
@pytest.mark.parametrize(("name", "settings", "expected"), CASES)
def test_moments_by_hand(
    rank: int, name: str, settings: dict[str, Any], expected: list[list[Pair]]
) -> None:
    found = moments_of(rank, name, settings, [1.0 + 2.0 * rank] * len(expected[0]))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected[rank]), rtol=0, atol=1e-6)


SEEN_BY_ONE: list[tuple[str, dict[str, Any], list[list[Pair]]]] = [
    # Until replica 1 has a v it takes in no m; both come in step 3: v is the mean of ⅞ and 0, m
    # that of 21/32 and 0, because replica 0 goes on from a half of its m twice.
    (
        "desloc",
        {"tau": 9, "first_moment_every": 1, "second_moment_every": 3},
        [
            [(0.25, 0.5), (0.3125, 0.75), (0.328125, 0.4375)],
            [(0.0, 0.0), (0.0, 0.0), (0.328125, 0.4375)],
        ],
    ),
    # Each step brings the mean of the step before. Replica 1 takes in none while its v is 0, as it
    # still is when that of step 2 comes; v is averaged after it. Replica 0's u are ½, then
    # ¾ − ½ (½ − ¼), then 13/16 − ½ (5/8 − 5/16).
    (
        "mt_dao",
        {
            **{"tau": 1, "slow_beta": 0.5, "first_moment_every": 1, "second_moment_every": 3},
            "late_momentum": True,
        },
        [
            [(0.5, 0.5), (0.625, 0.75), (0.65625, 0.4375)],
            [(0.0, 0.0), (0.0, 0.0), (0.0, 0.4375)],
        ],
    ),
]


@replicas(2)
@pytest.mark.parametrize(("name", "settings", "expected"), SEEN_BY_ONE)
def test_a_mean_is_not_divided_by_nothing(
    rank: int, name: str, settings: dict[str, Any], expected: list[list[Pair]]
) -> None:
    """Of a weight that only replica 0 has gradients for."""
    assert moments_of(rank, name, settings, [1.0 - rank] * 3) == expected[rank]


@replicas(2)
@pytest.mark.parametrize("name", MOMENTS)
def test_v_stays_positive_and_three_times_the_bytes_are_sent(rank: int, name: str) -> None:
    sent = []
    for settings in (MOMENTS[name], SETTINGS[name]):
        session = Session(rank, name, settings, "adamw", dtype=torch.float32)
        for _ in range(60):
            session.step()
            v = Moment(session.method.flat, session.optimizer, 1)  # type: ignore[attr-defined]
            assert min(chunk.read().min().item() for chunk in v.open()) >= 0
        session.method.flush()
        sent.append(session.method.stats().bytes_sent)
    assert sent[0] == 3 * sent[1] > 0


def test_a_parameter_without_gradient_has_no_moment() -> None:
    """Its moment counts as 0, and nothing is made for it."""
    weights = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = AdamW(weights, lr=0.1)
    method = METHODS["desloc"](METHODS["desloc"].Config(1, 1, 1))
    method.prepare(nn.ParameterList(weights), optimizer, co2.Mesh.world())
    for _ in range(2):
        weights[1].grad = torch.ones(3)
        method.step()
    assert not optimizer.state[weights[0]] and optimizer.state[weights[1]]["step"] == 2


def test_a_late_momentum_comes_at_the_ends_of_rounds() -> None:
    for every in (2, 7):
        hint = rf"^first_moment_every={every}: must be a multiple of tau, which is 3"
        with pytest.raises(ConfigError, match=hint):
            co2.MTDAO.Config(tau=3, first_moment_every=every, late_momentum=True)
    co2.MTDAO.Config(tau=3, first_moment_every=6, late_momentum=True)


ZERO1 = "mesh.strategy=zero1"


def test_what_zero1_cannot_share() -> None:
    for name, settings in MOMENTS.items():
        assert strategies(METHODS[name](METHODS[name].Config(**settings))) == {ZERO1}
        assert not strategies(METHODS[name]())
    assert strategies(METHODS["desloc"]()) == strategies(METHODS["mt_dao"]()) == {ZERO1}


def strategies(method: Method) -> set[str]:
    """Those that it refuses."""
    return {key for key in method.refusals() if key.startswith("mesh.strategy=")}
