"""Averaged moments on the back of an envelope: two replicas, one weight, gradients 1 and 3.

With β1 = β2 = ½ the moments after one step are m = ½, 3/2 and v = ½, 9/2; after two of the same
gradients ¾, 9/4 and ¾, 27/4. Everything expected here was typed, not computed by the code.
"""

from typing import Any

import pytest
import torch

import co2
from co2.errors import ConfigError
from co2.methods import METHODS
from co2.methods.base import Method
from co2.methods.shared.moments import Moment
from tests.methods import problem
from tests.methods.driver import MOMENTS, SETTINGS, Session
from tests.workers import Pool

Pair = tuple[float, float]


def trained(rank: int, world: int, name: str, settings: dict[str, Any], steps: int) -> list[Pair]:
    """m and v of a replica after each step."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.1, betas=(0.5, 0.5))
    method = METHODS[name](METHODS[name].Config(**settings))
    method.prepare(torch.nn.ParameterList([weight]), optimizer, co2.Mesh.world())
    history = []
    for _ in range(steps):
        weight.grad = torch.full_like(weight, 1.0 + 2.0 * rank)
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_moments_by_hand(workers: Pool, case: tuple[str, dict[str, Any], list[list[Pair]]]) -> None:
    name, settings, expected = case
    found = workers.run(trained, 2, name, settings, len(expected[0]))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-6)


def seen_by_one(rank: int, world: int, name: str, settings: dict[str, Any]) -> list[Pair]:
    """Of a weight that only replica 0 has gradients for: m and v."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight], lr=0.1, betas=(0.5, 0.5))
    method = METHODS[name](METHODS[name].Config(**settings))
    method.prepare(torch.nn.ParameterList([weight]), optimizer, co2.Mesh.world())
    history = []
    for _ in range(3):
        weight.grad = torch.full_like(weight, 1.0 - rank)
        method.step()
        state = optimizer.state[weight]
        history.append((state["exp_avg"].item(), state["exp_avg_sq"].item()))
    method.flush()
    return history


def test_a_mean_is_not_divided_by_nothing(workers: Pool) -> None:
    """Until replica 1 has a v it takes in no m; both come in step 3: v is the mean of ⅞ and 0, m
    that of 21/32 and 0, because replica 0 goes on from a half of its m twice."""
    settings = {"tau": 9, "first_moment_every": 1, "second_moment_every": 3}
    first, second = workers.run(seen_by_one, 2, "desloc", settings)
    assert first == [(0.25, 0.5), (0.3125, 0.75), (0.328125, 0.4375)]
    assert second == [(0.0, 0.0), (0.0, 0.0), (0.328125, 0.4375)]


def test_a_late_mean_is_not_either(workers: Pool) -> None:
    """Each step brings the mean of the step before. Replica 1 takes in none while its v is 0, as it
    still is when that of step 2 comes; v is averaged after it. Replica 0's u are ½, then
    ¾ − ½ (½ − ¼), then 13/16 − ½ (5/8 − 5/16)."""
    settings = {"tau": 1, "slow_beta": 0.5, "first_moment_every": 1, "second_moment_every": 3}
    first, second = workers.run(seen_by_one, 2, "mt_dao", {**settings, "late_momentum": True})
    assert first == [(0.5, 0.5), (0.625, 0.75), (0.65625, 0.4375)]
    assert second == [(0.0, 0.0), (0.0, 0.0), (0.0, 0.4375)]


def spread(rank: int, world: int, name: str, settings: dict[str, Any]) -> tuple[float, float]:
    """The smallest element of v in a long training on problem's data, and bytes sent."""
    session = Session(rank, name, settings, "adamw", dtype=torch.float32)
    least = float("inf")
    for _ in range(60):
        session.step()
        v = Moment(session.method.flat, session.optimizer, 1)  # type: ignore[attr-defined]
        least = min(least, *(chunk.read().min().item() for chunk in v.open()))
    session.method.flush()
    return least, session.method.stats().bytes_sent


@pytest.mark.parametrize("name", MOMENTS)
def test_v_stays_positive_and_three_times_the_bytes_are_sent(workers: Pool, name: str) -> None:
    plain = workers.run(spread, 2, name, SETTINGS[name])
    for (least, sent), (_, before) in zip(
        workers.run(spread, 2, name, MOMENTS[name]), plain, strict=True
    ):
        assert least >= 0
        assert sent == 3 * before


def test_a_parameter_without_gradient_has_no_moment() -> None:
    """Its moment counts as 0, and nothing is made for it."""
    weights = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    method = METHODS["desloc"](METHODS["desloc"].Config(1, 1, 1))
    method.prepare(torch.nn.ParameterList(weights), optimizer, co2.Mesh.world())
    for _ in range(2):
        weights[1].grad = torch.ones(3)
        method.step()
    assert not optimizer.state[weights[0]] and optimizer.state[weights[1]]["step"] == 2


@pytest.mark.parametrize(("name", "settings"), [*MOMENTS.items(), ("desloc", {}), ("mt_dao", {})])
def test_an_inner_optimizer_without_moments_is_refused(name: str, settings: dict[str, Any]) -> None:
    for kind in ("sgd", "amsgrad"):
        net, _ = problem.build(0, "sgd")
        params = [p for p in net.parameters() if p.requires_grad]
        optimizer = {
            "sgd": torch.optim.SGD(params, lr=0.1),
            "amsgrad": torch.optim.AdamW(params, lr=0.1, amsgrad=True),
        }[kind]
        method = METHODS[name](METHODS[name].Config(**settings))
        with pytest.raises(ConfigError, match=rf"^optim.name=\w+: {name}.* needs adamw"):
            method.prepare(net, optimizer, co2.Mesh.world())


@pytest.mark.parametrize("settings", [{"maximize": True}, {"weight_decay": 0.1}])
def test_mt_dao_needs_the_gradient_that_adamw_has_seen(settings: dict[str, Any]) -> None:
    """Adam adds its weight decay to it, where that is not decoupled."""
    weight = torch.nn.Parameter(torch.zeros(3))
    method = METHODS["mt_dao"]()
    with pytest.raises(ConfigError, match=r"^optim.name=Adam: mt_dao needs adamw"):
        method.prepare(
            torch.nn.ParameterList([weight]),
            torch.optim.Adam([weight], **settings),
            co2.Mesh.world(),
        )


ZERO1 = "mesh.strategy=zero1"


def test_what_zero1_cannot_share() -> None:
    for name, settings in MOMENTS.items():
        assert strategies(METHODS[name](METHODS[name].Config(**settings))) == {ZERO1}
        assert not strategies(METHODS[name]())
    assert strategies(METHODS["desloc"]()) == strategies(METHODS["mt_dao"]()) == {ZERO1}


def strategies(method: Method) -> set[str]:
    """Those that it refuses."""
    return {key for key in method.refusals() if key.startswith("mesh.strategy=")}
