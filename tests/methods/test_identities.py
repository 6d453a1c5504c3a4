"""What methods have in common: special cases in which one is another."""

from typing import Any

import pytest
import torch
from torch import Tensor

import co2
from co2.methods import METHODS
from tests.methods import problem
from tests.methods.driver import (
    MOMENTS,
    SETTINGS,
    Case,
    Session,
    Snapshot,
    assert_same,
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
EVERY_ROUND = {"first_moment_every": TAU, "second_moment_every": TAU}
NEVER = {"first_moment_every": 99, "second_moment_every": 99}
OF_ADAM = {"slow_beta": 0.9, "slow_weight": 1.0}

SAME: list[tuple[str, Case, Case]] = [
    ("sgd adamw", case("diloco", **PLAIN), LOCAL_SGD),
    ("adamw", case("co2_keep", "co2_keep", **ALL_WAIT), case("co2_keep", "co2_keep", delay=0)),
    ("adamw", case("co2_keep", keep_local=0.6, delay=TAU), case("co2_keep", keep_local=0.6)),
    ("adamw", case("desloc", **NEVER), LOCAL_SGD),
    # Both are Local Adam; DiLoCo where its outer step is the mean.
    ("adamw", case("desloc", **EVERY_ROUND), case("diloco", **PLAIN, average_moments=True)),
    # With Adam's own beta, momentum alone.
    ("adamw", case("mt_dao", "desloc", **OF_ADAM), case("desloc", "desloc")),
]
"""Inner optimizers, and two cases that are bit for bit one on three replicas."""

CLOSE: list[tuple[str, Case, Case]] = [
    ("plain momentum sgd decay", ("allreduce", {}), case("local_sgd", tau=1)),
    ("sgd adamw", ("sparta", {"share": 1.0}), case("local_sgd", tau=1)),
    ("sgd adamw", case("slowmo", **PLAIN), LOCAL_SGD),
    ("sgd adamw", case("co2_keep", keep_local=1.0, momentum_weight=0.0), COCOD_SGD),
    ("sgd adamw", case("co2_keep", delay=0, momentum_weight=0.0), LOCAL_SGD),
    (
        "sgd adamw",
        case("co2_keep", delay=0, outer_momentum=0.6, momentum_weight=0.6),
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

ALONE: list[tuple[str, Case, Case]] = [
    ("sgd adamw", case("eager_diloco", "diloco"), case("diloco", "diloco")),
    # Averaging moments changes no bit, however late it is.
    *(("adamw", (name, MOMENTS[name]), case(name, name)) for name in MOMENTS),
    (
        "adamw",
        case("mt_dao", "mt_dao", first_moment_every=TAU, late_momentum=True),
        case("mt_dao", "mt_dao", first_moment_every=TAU),
    ),
]
"""On one replica, but for rounding."""


def each(table: list[tuple[str, Case, Case]]) -> list[Any]:
    return [(optimizer, one, other) for words, one, other in table for optimizer in words.split()]


@replicas(3)
@pytest.mark.parametrize(("optimizer", "one", "other"), each(SAME), ids=str)
def test_the_same(rank: int, world: int, optimizer: str, one: Case, other: Case) -> None:
    first, second = (trajectory(rank, world, *kind, optimizer) for kind in (one, other))
    assert_same(first, second)


@replicas(3)
@pytest.mark.parametrize(("optimizer", "one", "other"), each(CLOSE), ids=str)
def test_the_same_but_for_rounding(
    rank: int, world: int, optimizer: str, one: Case, other: Case
) -> None:
    assert_alike(*(trajectory(rank, world, *kind, optimizer) for kind in (one, other)))


@pytest.mark.parametrize(("optimizer", "one", "other"), each(ALONE), ids=str)
def test_the_same_alone(optimizer: str, one: Case, other: Case) -> None:
    first, second = (trajectory(0, 1, *kind, optimizer) for kind in (one, other))
    if one[0] == "eager_diloco":
        assert_alike(first, second)
    else:
        assert_same(first, second)


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


@replicas(3)
def test_a_pull_of_nearly_1_to_the_replicas_own_mean_is_nearly_local_sgds(
    rank: int, world: int
) -> None:
    own = {"tau": TAU, **ALL_WAIT, "pull": 0.99, "outer_momentum": 0.0}
    waited = trajectory(rank, world, "overlap_local_sgd", own, "adamw")
    local = trajectory(rank, world, *LOCAL_SGD, "adamw")
    torch.testing.assert_close(waited, local, rtol=0.05, atol=0.05)


def test_a_late_round_that_waits_for_nothing_is_plain() -> None:
    """Without a known end of training there is no first share."""
    plain, shared = (
        Session(0, *kind).train(3 * TAU).snapshot()
        for kind in (case("co2", "co2"), case("co2", "co2", blocking_share=0.5))
    )
    assert_same(shared, plain)


def momenta(rank: int, world: int, late: bool) -> list[Tensor]:
    """u at the ends of rounds under gradients that do not depend on the weights."""
    weight = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    fields = {"tau": TAU, "slow_beta": 0.8, "first_moment_every": 4 * TAU, "late_momentum": late}
    method = co2.MTDAO(co2.MTDAO.Config(**fields))
    method.prepare(torch.nn.ParameterList([weight]), optimizer, co2.Mesh.world())
    found = []
    for step in range(9 * TAU):
        generator = torch.Generator().manual_seed(100 * step + rank)
        weight.grad = torch.randn(5, generator=generator, dtype=torch.float64)
        method.step()
        if (step + 1) % TAU == 0:
            found.append(optimizer.state[weight]["exp_avg"].clone())
    method.flush()
    return found


@replicas(3)
def test_a_late_momentum_is_that_in_time_once_it_has_come(rank: int, world: int) -> None:
    """The means of rounds 4 and 8 come with rounds 5 and 9: until then, u lacks them."""
    late, in_time = (momenta(rank, world, is_late) for is_late in (True, False))
    for number, (now, then) in enumerate(zip(late, in_time, strict=True), start=1):
        same = torch.allclose(now, then, rtol=1e-12, atol=1e-12)
        assert same == (number not in (4, 8)), number


def drifted(rank: int, world: int, name: str, settings: dict[str, Any]) -> list[Tensor]:
    """Round starts 1, 2, ... under gradients that do not depend on the weights."""
    model, optimizer = problem.build_drift([4, 7])
    method = METHODS[name](METHODS[name].Config(**settings))
    method.prepare(model, optimizer, co2.Mesh.world())
    starts = []
    for step in range(5 * TAU):
        problem.backward_drift(model, step, rank)
        method.step()
        if (step + 1) % TAU == 0:
            starts.append(torch.cat([weight.detach().clone() for weight in model.parameters()]))
    method.flush()
    return starts


DRIFTS: list[tuple[Case, Case]] = [
    (case("co2", **PLAIN, gap_penalty="none"), LOCAL_SGD),
    # At a constant inner rate gamma, SlowMo's alpha gamma m with m = beta m + d/gamma is CO2's.
    (
        case("co2", outer_lr=0.8, outer_momentum=0.6, gap_penalty="none"),
        case("slowmo", outer_lr=0.8, outer_momentum=0.6),
    ),
]


@replicas(3)
@pytest.mark.parametrize(("late", "in_time"), DRIFTS, ids=str)
def test_co2_is_another_a_round_late(rank: int, world: int, late: Case, in_time: Case) -> None:
    found, expected = (drifted(rank, world, *kind) for kind in (late, in_time))
    torch.testing.assert_close(found[1:], expected[:-1], rtol=1e-12, atol=1e-12)


@replicas(3)
def test_kept_progress_that_keeps_none_is_co2_from_the_second_round_on(
    rank: int, world: int
) -> None:
    """CO2 throws the first round's end away, where nothing has arrived; kept progress does not."""
    kept = drifted(rank, world, *case("co2_keep", keep_local=0.0, momentum_weight=0.0))
    late = drifted(rank, world, *case("co2", **PLAIN, gap_penalty="none"))
    torch.testing.assert_close(kept[1:], late[1:])
