"""What methods have in common: special cases in which one is another."""

from typing import Any

import pytest
import torch
from torch import Tensor

import co2
from co2.methods import METHODS
from tests.methods import problem
from tests.methods.driver import MOMENTS, SETTINGS, Session, Snapshot, assert_same, trajectory
from tests.workers import Pool

TAU = 3


def weights_only(history: list[Snapshot]) -> list[Snapshot]:
    names = [name for name, _ in problem.Net().named_parameters()]
    return [{name: state[name] for name in names} for state in history]


def assert_alike(runs: list[list[Snapshot]], others: list[list[Snapshot]]) -> None:
    for run, other in zip(runs, others, strict=True):
        torch.testing.assert_close(weights_only(run), weights_only(other), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("optimizer", ["plain", "momentum", "sgd", "decay"])
def test_local_sgd_of_one_step_is_allreduce(workers: Pool, optimizer: str) -> None:
    ddp = workers.run(trajectory, 3, "allreduce", {}, optimizer)
    local = workers.run(trajectory, 3, "local_sgd", {"tau": 1}, optimizer)
    assert_alike(ddp, local)


def test_local_sgd_of_one_step_is_not_allreduce_for_adam(workers: Pool) -> None:
    ddp = workers.run(trajectory, 2, "allreduce", {}, "adamw")
    local = workers.run(trajectory, 2, "local_sgd", {"tau": 1}, "adamw")
    with pytest.raises(AssertionError, match="not close"):
        assert_alike(ddp, local)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_slowmo_without_momentum_is_local_sgd(workers: Pool, optimizer: str) -> None:
    settings = {"tau": TAU, "outer_lr": 1.0, "outer_momentum": 0.0}
    slowmo = workers.run(trajectory, 3, "slowmo", settings, optimizer)
    local = workers.run(trajectory, 3, "local_sgd", {"tau": TAU}, optimizer)
    assert_alike(slowmo, local)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_diloco_without_momentum_is_local_sgd(workers: Pool, optimizer: str) -> None:
    settings = {"tau": TAU, "outer_lr": 1.0, "outer_momentum": 0.0}
    diloco = workers.run(trajectory, 3, "diloco", settings, optimizer)
    assert_same(diloco, workers.run(trajectory, 3, "local_sgd", {"tau": TAU}, optimizer))


CO2_PLAIN = {"tau": TAU, "outer_lr": 1.0, "outer_momentum": 0.0, "gap_penalty": "none"}
NESTEROV = {"tau": TAU, "outer_lr": 1.0, "outer_momentum": 0.6}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("own", "name", "settings"),
    [
        ({"keep_local": 1.0, "momentum_weight": 0.0}, "cocod_sgd", {"tau": TAU}),
        ({"delay": 0, "momentum_weight": 0.0}, "local_sgd", {"tau": TAU}),
        ({"delay": 0, "outer_momentum": 0.6, "momentum_weight": 0.6}, "diloco", NESTEROV),
    ],
    ids=["cocod_sgd", "local_sgd", "diloco"],
)
def test_kept_progress_at_its_limits(
    workers: Pool, own: dict[str, Any], name: str, settings: dict[str, Any], optimizer: str
) -> None:
    kept = workers.run(trajectory, 3, "co2_keep", {"tau": TAU, **own}, optimizer)
    assert_alike(kept, workers.run(trajectory, 3, name, settings, optimizer))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_eager_diloco_alone_is_diloco(workers: Pool, optimizer: str) -> None:
    eager = workers.run(trajectory, 1, "eager_diloco", SETTINGS["diloco"], optimizer)
    diloco = workers.run(trajectory, 1, "diloco", SETTINGS["diloco"], optimizer)
    assert_alike(eager, diloco)


ALWAYS = {"tau": TAU, "blocking_share": 1.0}


@pytest.mark.parametrize(
    ("early", "own", "name", "settings"),
    [
        ("cocod_sgd", {}, "local_sgd", {"tau": TAU}),
        ("eager_diloco", {"outer_lr": 0.7, "outer_momentum": 0.6}, "diloco", SETTINGS["diloco"]),
        ("overlap_local_sgd", {"pull": 0.99, "outer_momentum": 0.0}, None, {}),
        (
            "co2",
            {"outer_lr": 0.8, "outer_momentum": 0.5, "gap_penalty": "gap_aware"},
            "co2_released",
            {"tau": TAU, "outer_lr": 0.8, "outer_momentum": 0.5, "gap_penalty": 1.0},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rounds_that_all_wait(
    workers: Pool,
    early: str,
    own: dict[str, Any],
    name: str | None,
    settings: dict[str, Any],
) -> None:
    """A pull of nearly 1 to the replicas' own mean is nearly local SGD's."""
    waited = workers.run(trajectory, 3, early, {**ALWAYS, **own}, "adamw")
    if name is not None:
        assert_alike(waited, workers.run(trajectory, 3, name, settings, "adamw"))
        return
    local = workers.run(trajectory, 3, "local_sgd", {"tau": TAU}, "adamw")
    for run, other in zip(waited, local, strict=True):
        for now, then in zip(run, other, strict=True):
            torch.testing.assert_close(now, then, rtol=0.05, atol=0.05)


def test_kept_progress_that_always_waits_has_no_delay(workers: Pool) -> None:
    own = SETTINGS["co2_keep"]
    waited = workers.run(trajectory, 3, "co2_keep", {**own, **ALWAYS}, "adamw")
    assert_same(waited, workers.run(trajectory, 3, "co2_keep", {**own, "delay": 0}, "adamw"))


def test_a_late_round_that_waits_for_nothing_is_plain(workers: Pool) -> None:
    """Without a known end of training there is no first share."""
    plain = Session(0, "co2", SETTINGS["co2"])
    shared = Session(0, "co2", {**SETTINGS["co2"], "blocking_share": 0.5})
    for _ in range(3 * TAU):
        plain.step()
        shared.step()
    assert_same(shared.snapshot(), plain.snapshot())


def test_kept_progress_with_a_delay_of_a_round(workers: Pool) -> None:
    settings = {"tau": TAU, "keep_local": 0.6}
    named = workers.run(trajectory, 3, "co2_keep", {**settings, "delay": TAU}, "adamw")
    assert_same(named, workers.run(trajectory, 3, "co2_keep", settings, "adamw"))


def test_moments_of_alike_replicas_are_their_mean(workers: Pool) -> None:
    """Alone, averaging changes no bit, however late it is."""
    for name, settings in MOMENTS.items():
        plain = workers.run(trajectory, 1, name, SETTINGS[name], "adamw")
        assert_same(workers.run(trajectory, 1, name, settings, "adamw"), plain)


def test_desloc_without_moments_is_local_sgd(workers: Pool) -> None:
    settings = {"tau": TAU, "first_moment_every": 99, "second_moment_every": 99}
    desloc = workers.run(trajectory, 3, "desloc", settings, "adamw")
    assert_same(desloc, workers.run(trajectory, 3, "local_sgd", {"tau": TAU}, "adamw"))


def test_desloc_of_equal_periods_is_diloco_with_averaged_moments(workers: Pool) -> None:
    """Both are Local Adam; DiLoCo where its outer step is the mean."""
    settings = {"tau": TAU, "first_moment_every": TAU, "second_moment_every": TAU}
    own = {"tau": TAU, "outer_lr": 1.0, "outer_momentum": 0.0, "average_moments": True}
    diloco = workers.run(trajectory, 3, "diloco", own, "adamw")
    assert_same(workers.run(trajectory, 3, "desloc", settings, "adamw"), diloco)


def test_mt_dao_of_momentum_alone_is_desloc(workers: Pool) -> None:
    """With Adam's own beta."""
    own = {"slow_beta": 0.9, "slow_weight": 1.0}
    mt_dao = workers.run(trajectory, 3, "mt_dao", {**SETTINGS["desloc"], **own}, "adamw")
    assert_same(mt_dao, workers.run(trajectory, 3, "desloc", SETTINGS["desloc"], "adamw"))


def test_mt_dao_without_momentum_knows_no_beta(workers: Pool) -> None:
    settings = {**SETTINGS["mt_dao"], "slow_weight": 0.0}
    runs = [
        workers.run(trajectory, 2, "mt_dao", {**settings, "slow_beta": beta}, "adamw")
        for beta in (0.0, 0.8)
    ]
    assert_alike(*runs)


def test_a_late_momentum_alone_is_one_in_time(workers: Pool) -> None:
    settings = {**SETTINGS["mt_dao"], "first_moment_every": TAU}
    late = workers.run(trajectory, 1, "mt_dao", {**settings, "late_momentum": True}, "adamw")
    assert_same(late, workers.run(trajectory, 1, "mt_dao", settings, "adamw"))


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


def test_a_late_momentum_is_that_in_time_once_it_has_come(workers: Pool) -> None:
    """The means of rounds 4 and 8 come with rounds 5 and 9: until then, u lacks them."""
    pairs = zip(workers.run(momenta, 3, True), workers.run(momenta, 3, False), strict=True)
    for late, in_time in pairs:
        for number, (now, then) in enumerate(zip(late, in_time, strict=True), start=1):
            same = torch.allclose(now, then, rtol=1e-12, atol=1e-12)
            assert same == (number not in (4, 8)), number


def test_kept_progress_without_delay_averages_moments_at_once(workers: Pool) -> None:
    own = {"tau": TAU, "delay": 0, "momentum_weight": 0.0, "average_moments": True}
    kept = workers.run(trajectory, 3, "co2_keep", own, "adamw")
    settings = {"tau": TAU, "first_moment_every": TAU, "second_moment_every": TAU}
    assert_alike(kept, workers.run(trajectory, 3, "desloc", settings, "adamw"))


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


def test_kept_progress_that_keeps_none_is_co2_from_the_second_round_on(workers: Pool) -> None:
    """CO2 throws the first round's end away, where nothing has arrived; kept progress does not."""
    settings = {"tau": TAU, "keep_local": 0.0, "momentum_weight": 0.0}
    kept = workers.run(drifted, 3, "co2_keep", settings)
    late = workers.run(drifted, 3, "co2", CO2_PLAIN)
    for run, other in zip(kept, late, strict=True):
        for now, then in zip(run[1:], other[1:], strict=True):
            torch.testing.assert_close(now, then)


def test_co2_without_momentum_and_gap_is_local_sgd_a_round_late(workers: Pool) -> None:
    settings = {"tau": TAU, "outer_lr": 1.0, "outer_momentum": 0.0, "gap_penalty": "none"}
    late = workers.run(drifted, 3, "co2", settings)
    local = workers.run(drifted, 3, "local_sgd", {"tau": TAU})
    for run, other in zip(late, local, strict=True):
        torch.testing.assert_close(run[1:], other[:-1], rtol=1e-12, atol=1e-12)


def test_co2_is_slowmo_a_round_late(workers: Pool) -> None:
    """At a constant inner rate gamma, SlowMo's alpha gamma m with m = beta m + d/gamma is CO2's."""
    settings = {"tau": TAU, "outer_lr": 0.8, "outer_momentum": 0.6}
    late = workers.run(drifted, 3, "co2", {**settings, "gap_penalty": "none"})
    slowmo = workers.run(drifted, 3, "slowmo", settings)
    for run, other in zip(late, slowmo, strict=True):
        torch.testing.assert_close(run[1:], other[:-1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["allreduce", "local_sgd", "slowmo", "diloco", "co2"])
def test_replicas_start_rounds_bit_for_bit_alike(workers: Pool, name: str) -> None:
    """Rounding must not part them: nothing would ever bring them together again."""
    first, *others = (weights_only(run) for run in workers.run(trajectory, 4, name, SETTINGS[name]))
    for other in others:
        assert_same(other[::TAU], first[::TAU])
        assert name == "allreduce" or not torch.equal(other[1]["scale"], first[1]["scale"])


def test_cocod_sgd_alone_is_plain_training() -> None:
    session = Session(0, "cocod_sgd", {"tau": TAU})
    net, optimizer = problem.build(0, "sgd")
    for step in range(5 * TAU):
        session.step()
        problem.set_lr(optimizer, step)
        problem.backward(net, step, 0)
        optimizer.step()
        optimizer.zero_grad()
        assert_same(session.snapshot(), problem.snapshot(net))
