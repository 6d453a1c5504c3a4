"""What methods have in common: special cases in which one is another; and averaged moments on the
back of an envelope."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import co2
from co2.methods import METHODS
from co2.methods.shared.moments import Moment
from tests.grids import grid
from tests.methods import problem
from tests.methods.driver import (
    MOMENTS,
    SETTINGS,
    Case,
    Session,
    Snapshot,
    assert_same,
    drifted,
    inner,
    trajectory,
)
from tests.workers import replicas

TAU = 3


def weights_only(history: list[Snapshot]) -> list[Snapshot]:
    names = [name for name, _ in problem.Net().named_parameters()]
    return [{name: state[name] for name in names} for state in history]


def assert_alike(one: list[Snapshot], other: list[Snapshot]) -> None:
    torch.testing.assert_close(weights_only(one), weights_only(other), rtol=1e-11, atol=1e-11)


def case(name: str, base: str | None = None, **settings: Any) -> Case:
    """A method with rounds of TAU steps, or with the settings of `base`."""
    return name, {**({"tau": TAU} if base is None else SETTINGS[base]), **settings}


LOCAL_SGD, COCOD_SGD = case("local_sgd"), case("cocod_sgd")
PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0}
NESTEROV = {"outer_lr": 1.0, "outer_momentum": 0.6}
ALL_WAIT = {"blocking_share": 1.0}
WHOLE = {"fragments": 1, "momentum_weight": 0.0}
EVERY_ROUND = {"first_moment_every": TAU, "second_moment_every": TAU}
NEVER = {"first_moment_every": 99, "second_moment_every": 99}
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.6}
ONE_FRAGMENT = {"fragments": 1, "delay": 0, "mixing": 0.0}
OF_ADAM = {"slow_beta": 0.9, "slow_weight": 1.0}

Pair = tuple[str, Case, Case]
SAME: list[Pair] = [
    ("sgd adamw", case("diloco", **PLAIN), LOCAL_SGD),
    ("adamw", case("co2_keep", "co2_keep", **ALL_WAIT), case("co2_keep", "co2_keep", delay=0)),
    ("adamw", case("co2_keep", **WHOLE, delay=TAU), case("co2_keep", **WHOLE)),
    ("adamw", case("desloc", **NEVER), LOCAL_SGD),
    ("sgd adamw", case("streaming_diloco", **ONE_FRAGMENT, **OUTER), case("diloco", **OUTER)),
    # Both are Local Adam; DiLoCo where its outer step is the mean.
    ("adamw", case("desloc", **EVERY_ROUND), case("diloco", **PLAIN, average_moments=True)),
    # With Adam's own beta, momentum alone.
    ("adamw", case("mt_dao", "desloc", **OF_ADAM), case("desloc", "desloc")),
]
"""Inner optimizers, and two cases that are bit for bit one on three replicas."""

CLOSE: list[Pair] = [
    ("plain momentum sgd decay", ("allreduce", {}), case("local_sgd", tau=1)),
    ("sgd adamw", ("sparta", {"share": 1.0}), case("local_sgd", tau=1)),
    ("sgd adamw", case("slowmo", **PLAIN), LOCAL_SGD),
    ("sgd adamw", case("co2_keep", **WHOLE, keep_local=1.0), COCOD_SGD),
    ("sgd adamw", case("co2_keep", **WHOLE, delay=0), LOCAL_SGD),
    (
        "sgd adamw",
        case("co2_keep", fragments=1, delay=0, outer_momentum=0.6, momentum_weight=0.6),
        case("diloco", **NESTEROV),
    ),
    (
        "adamw",
        case("co2_keep", delay=0, momentum_weight=0.0, average_moments=True),
        case("desloc", **EVERY_ROUND),
    ),
    ("adamw", case("cocod_sgd", **ALL_WAIT), LOCAL_SGD),
    ("adamw", case("eager_diloco", "diloco", **ALL_WAIT), case("diloco", "diloco")),
    (
        "adamw",
        case("co2", **ALL_WAIT, outer_lr=0.8, outer_momentum=0.5, gap_penalty="gap_aware"),
        case("co2_released", outer_lr=0.8, outer_momentum=0.5, gap_penalty=1.0),
    ),
    # Without momentum, it knows no beta of it.
    (
        "adamw",
        case("mt_dao", "mt_dao", slow_weight=0.0, slow_beta=0.0),
        case("mt_dao", "mt_dao", slow_weight=0.0),
    ),
]
"""The same, but for rounding."""

ALONE_CLOSE: list[Pair] = [("sgd adamw", case("eager_diloco", "diloco"), case("diloco", "diloco"))]
ALONE: list[Pair] = [
    # Averaging moments changes no bit, however late it is.
    *(("adamw", (name, MOMENTS[name]), case(name, name)) for name in MOMENTS),
    (
        "adamw",
        case("mt_dao", "mt_dao", first_moment_every=TAU, late_momentum=True),
        case("mt_dao", "mt_dao", first_moment_every=TAU),
    ),
]
"""On one replica."""
TABLES = ((SAME, 3, True), (CLOSE, 3, False), (ALONE, 1, True), (ALONE_CLOSE, 1, False))
ALIKE = [
    (world, optimizer, one, other, exact)
    for table, world, exact in TABLES
    for words, one, other in table
    for optimizer in words.split()
]


@replicas()
@pytest.mark.parametrize(
    ("world", "optimizer", "one", "other", "exact"),
    grid(ALIKE, lambda one: one[1] in ("adamw", "momentum")),
    ids=str,
)
def test_the_same(
    rank: int, world: int, optimizer: str, one: Case, other: Case, exact: bool
) -> None:
    first, second = (trajectory(rank, world, *kind, optimizer) for kind in (one, other))
    (assert_same if exact else assert_alike)(first, second)


@pytest.mark.parametrize(
    ("name", "settings"), [("cocod_sgd", {"tau": TAU}), ("sparta", {"share": 0.5, "delay": 2})]
)
def test_plain_training_alone(name: str, settings: dict[str, Any]) -> None:
    net, optimizer = problem.build(0, inner(name))
    for step, found in enumerate(trajectory(0, 1, name, settings)):
        torch.testing.assert_close(found, problem.snapshot(net), rtol=1e-11, atol=1e-11)
        problem.set_lr(optimizer, step)
        problem.backward(net, step, 0)
        optimizer.step()
        optimizer.zero_grad()


@replicas(2)
def test_local_sgd_of_one_step_is_not_allreduce_for_adam(rank: int, world: int) -> None:
    ddp = trajectory(rank, world, "allreduce", {}, "adamw")
    with pytest.raises(AssertionError, match="not close"):
        assert_alike(ddp, trajectory(rank, world, "local_sgd", {"tau": 1}, "adamw"))


def round_starts(rank: int, case: Case) -> list[Tensor]:
    """The weights after each round."""
    return drifted(rank, case)[0][TAU - 1 :: TAU]


DRIFTS: list[tuple[Case, Case]] = [
    (case("co2", **PLAIN, gap_penalty="none"), LOCAL_SGD),
    # At a constant inner rate gamma, SlowMo's alpha gamma m with m = beta m + d/gamma is CO2's.
    (case("co2", **OUTER, gap_penalty="none"), case("slowmo", **OUTER)),
]


@replicas(3)
@pytest.mark.parametrize(("late", "in_time"), DRIFTS, ids=str)
def test_co2_is_another_a_round_late(rank: int, late: Case, in_time: Case) -> None:
    found, expected = round_starts(rank, late), round_starts(rank, in_time)
    torch.testing.assert_close(found[1:], expected[:-1], rtol=1e-12, atol=1e-12)


@replicas(3)
def test_kept_progress_that_keeps_none_is_co2_from_the_second_round_on(rank: int) -> None:
    """CO2 throws the first round's end away, where nothing has arrived; kept progress does not."""
    kept = round_starts(rank, case("co2_keep", **WHOLE, keep_local=0.0))
    late = round_starts(rank, case("co2", **PLAIN, gap_penalty="none"))
    torch.testing.assert_close(kept[1:], late[1:])


# Two replicas, one weight. With β1 = β2 = ½ and gradients 1 and 3 the moments after one step are
# m = ½, 3/2 and v = ½, 9/2; after two of the same gradients ¾, 9/4 and ¾, 27/4. All was typed.

Moments = list[tuple[float, float]]
LATE_MT_DAO = {"slow_beta": 0.5, "late_momentum": True}
BY_HAND: list[tuple[str, dict[str, Any], Moments, Moments]] = [
    # after step 2 the mean of m = ¾, 9/4; after step 3 the mean of v = ⅞, 63/8
    (
        "desloc",
        {"tau": 5, "first_moment_every": 2, "second_moment_every": 3},
        [(0.5, 0.5), (1.5, 0.75), (1.25, 4.375)],
        [(1.5, 4.5), (1.5, 6.75), (2.25, 4.375)],
    ),
    # u is sent after step 2, and its mean 3/2 arrives after step 4: a quarter of what it adds
    (
        "mt_dao",
        {"tau": 2, "first_moment_every": 2, "second_moment_every": 9, **LATE_MT_DAO},
        [(0.5, 0.5), (0.75, 0.75), (0.875, 0.875), (0.9375 + 0.1875, 0.9375)],
        [(1.5, 4.5), (2.25, 6.75), (2.625, 7.875), (2.8125 - 0.1875, 8.4375)],
    ),
    (
        "diloco",
        {"tau": 2, "average_moments": True},
        [(0.5, 0.5), (1.5, 3.75)],
        [(1.5, 4.5), (1.5, 3.75)],
    ),
    # sent after step 2, the means 3/2 and 15/4 arrive after step 3: the half of what they add
    (
        "co2_keep",
        {"tau": 2, "delay": 1, "average_moments": True},
        [(0.5, 0.5), (0.75, 0.75), (0.875 + 0.375, 0.875 + 1.5)],
        [(1.5, 4.5), (2.25, 6.75), (2.625 - 0.375, 7.875 - 1.5)],
    ),
    # after step 4 a quarter of it: m = 15/16, 45/16 and v = 15/16, 135/16 without any mean
    (
        "co2",
        {"tau": 2, "average_moments": True},
        [(0.5, 0.5), (0.75, 0.75), (0.875, 0.875), (0.9375 + 0.1875, 0.9375 + 0.75)],
        [(1.5, 4.5), (2.25, 6.75), (2.625, 7.875), (2.8125 - 0.1875, 8.4375 - 0.75)],
    ),
]
SEEN_BY_ONE: list[tuple[str, dict[str, Any], Moments, Moments]] = [
    # Until replica 1 has a v it takes in no m; both come in step 3: v is the mean of ⅞ and 0, m
    # that of 21/32 and 0, because replica 0 goes on from a half of its m twice.
    (
        "desloc",
        {"tau": 9, "first_moment_every": 1, "second_moment_every": 3},
        [(0.25, 0.5), (0.3125, 0.75), (0.328125, 0.4375)],
        [(0.0, 0.0), (0.0, 0.0), (0.328125, 0.4375)],
    ),
    # Each step brings the mean of the step before. Replica 1 takes in none while its v is 0, as it
    # still is when that of step 2 comes; v is averaged after it. Replica 0's u are ½, then
    # ¾ − ½ (½ − ¼), then 13/16 − ½ (5/8 − 5/16).
    (
        "mt_dao",
        {"tau": 1, "first_moment_every": 1, "second_moment_every": 3, **LATE_MT_DAO},
        [(0.5, 0.5), (0.625, 0.75), (0.65625, 0.4375)],
        [(0.0, 0.0), (0.0, 0.0), (0.0, 0.4375)],
    ),
]
"""The gradients are 1 and 0. No mean is divided by nothing."""


@replicas(2)
@pytest.mark.parametrize(
    ("gradients", "name", "settings", "expected"),
    [
        *(((1.0, 3.0), name, settings, both) for name, settings, *both in BY_HAND),
        *(((1.0, 0.0), name, settings, both) for name, settings, *both in SEEN_BY_ONE),
    ],
)
def test_moments_by_hand(
    rank: int,
    gradients: tuple[float, float],
    name: str,
    settings: dict[str, Any],
    expected: list[Moments],
) -> None:
    """m and v of each replica after each step."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = AdamW([weight], lr=0.1, betas=(0.5, 0.5))
    method = METHODS[name](**settings)
    method.prepare(nn.ParameterList([weight]), optimizer, co2.Mesh.world())
    history = []
    for _ in expected[rank]:
        weight.grad = torch.full_like(weight, gradients[rank])
        method.step()
        state = optimizer.state[weight]
        history.append((state["exp_avg"].item(), state["exp_avg_sq"].item()))
    method.flush()
    assert history == expected[rank]


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
