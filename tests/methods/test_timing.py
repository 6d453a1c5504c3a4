"""When rounds end, and when collectives run: what a method computes does not depend on how long
they take, and ranks agree on them."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import co2
from co2.errors import ConfigError
from co2.methods.base import ELASTIC, QUORUM
from co2.methods.diloco import DiLoCo
from co2.methods.shared.auto_tau import AUTO, START
from co2.methods.shared.rounds import round_ends
from tests.grids import OF_A_KIND, grid
from tests.methods import problem
from tests.methods.driver import (
    DENSE,
    MOMENTS,
    OVERLAPPED,
    SETTINGS,
    SPARSE,
    Session,
    Snapshot,
    assert_same,
    inner_of,
    reference_of,
    replicas_of,
    trajectory,
)
from tests.methods.network import Recorder, SlowNetwork
from tests.workers import Pool, everybody, replicas

TAU = 3
ROUNDS = 5
STEPS = ROUNDS * TAU


# Rounds whose length follows the learning rate (`tau_power`).

POWER = 2.0
LONG = 24


def cosine(step: int) -> float:
    return 0.55 + 0.45 * math.cos(math.pi * step / 600)


def lengths(rate: Any, steps: int, tau: int, power: float) -> list[int]:
    ends = [0, *round_ends(rate, steps, tau, power)]
    return [late - early for early, late in itertools.pairwise(ends)]


@pytest.mark.parametrize("steps", [600, 601, 611])
def test_power_0_and_a_constant_rate_make_equal_rounds(steps: int) -> None:
    assert lengths(cosine, steps, 12, 0.0) == [12] * 50
    assert lengths(lambda step: 0.3, steps, 12, 2.0) == [12] * 50
    assert lengths(lambda step: 0.0, steps, 12, 2.0) == [12] * 50


def test_length_times_rate_to_the_power_is_constant() -> None:
    found = lengths(cosine, 600, 12, 1.0)
    assert len(found) == 50
    assert sum(found) == 600
    begins = [sum(found[:number]) for number in range(50)]
    mean_rate = sum(map(cosine, range(600))) / 600
    for begin, length in zip(begins, found, strict=True):
        rate = cosine(begin + length // 2)
        assert abs(length - 12 * mean_rate / rate) < 1.5, "rounded to whole steps"
    assert found == sorted(found) or max(a - b for a, b in itertools.pairwise(found)) == 1


def test_a_warm_up_counts_as_the_rate_that_it_leads_to() -> None:
    warmed = lengths(lambda step: cosine(step) * min(1.0, (step + 1) / 60), 600, 12, 1.0)
    assert max(warmed[:4]) - min(warmed[:4]) <= 1, "rounded to whole steps"


def test_no_more_than_a_mean_in_a_step() -> None:
    assert lengths(lambda step: 0.5**step, 12, 2, 3.0)[:4] == [1, 1, 1, 1]


@pytest.mark.parametrize("name", ["local_sgd", "slowmo", "diloco"])
def test_unequal_rounds_equal_the_reference(workers: Pool, name: str) -> None:
    """The references train rounds of any length, one after the other."""
    settings = {**SETTINGS[name], "tau_power": POWER}
    measured = workers.run(trajectory, 2, name, settings, None, torch.float64, LONG)
    simulated = replicas_of("sgd", 2)

    def rate(step: int) -> float:
        return max(problem.rates(simulated[0].optimizer, step))

    ends = round_ends(rate, LONG, TAU, POWER)
    assert len(set(lengths(rate, LONG, TAU, POWER))) > 1
    train = type(simulated[0]).train
    upcoming: list[int] = []
    for replica in simulated:
        replica.train = lambda tau, one=replica: train(one, upcoming[0])  # type: ignore[method-assign]
    rounds = reference_of((name, SETTINGS[name]), simulated)
    done = 0
    for end in ends:
        upcoming[:] = [end - done]
        next(rounds)
        done = end
        for history, replica in zip(measured, simulated, strict=True):
            torch.testing.assert_close(
                history[end], problem.snapshot(replica.model), rtol=1e-12, atol=1e-12
            )


def test_unequal_rounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="tau_power=1: must be 0 with tau=auto"):
        DiLoCo.Config(tau="auto", tau_power=1)
    refused = DiLoCo(DiLoCo.Config(tau_power=1)).refusals()
    assert {ELASTIC, QUORUM} <= refused.keys()
    with pytest.raises(ConfigError, match=r"local_sgd.tau_power=1\.0: needs the learning rate"):
        Session(0, "local_sgd", {"tau_power": 1.0})


@replicas(2)
def test_consensus_at_the_end_of_the_first_round_of_tau_auto(rank: int) -> None:
    """It lasts `START` steps, each of which moves replica i by −(i + 1)."""
    model, optimizer = problem.build_drift([5, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    method = co2.CO2(co2.CO2.Config(tau=AUTO))
    method.prepare(model, optimizer, co2.Mesh.world())
    starts = [weight.detach().clone() for weight in model.parameters()]
    for _ in range(START):
        for weight in model.parameters():
            weight.grad = torch.full_like(weight, rank + 1)
        method.step()
    assert_same([weight.detach() for weight in model.parameters()], starts)
    with method.consensus():
        for weight, start in zip(model.parameters(), starts, strict=True):
            torch.testing.assert_close(weight.detach(), start - 1.5 * START)
    method.flush()


# Networks as slow as they may be.


def on_slow_network(
    rank: int, name: str, settings: dict[str, Any], delay: Callable[[int], int]
) -> tuple[list[Snapshot], list[bool]]:
    """A trajectory, and of each collective whether it was waited for before its time."""
    session = Session(rank, name, settings, inner_of((name, settings)))
    history = [session.snapshot()]
    with SlowNetwork(delay) as network:
        for _ in range(STEPS):
            session.step()
            network.tick()
            history.append(session.snapshot())
        forced = [work.forced for work in network.works]
        session.method.flush()
    return history, forced


@replicas()
@pytest.mark.parametrize(
    ("name", "world"),
    grid(
        [*((name, 2) for name in OVERLAPPED), ("co2", 3)],
        lambda case: case == ("co2", 3) or (case[0] in OF_A_KIND and case[0] != "co2"),
    ),
)
def test_the_network_may_take_a_whole_round(rank: int, world: int, name: str) -> None:
    """A collective may take TAU steps, when it runs only because somebody waits for it.

    A round of Streaming DiLoCo has one collective per fragment, under way for `delay` steps only. A
    step of ACCO has one, under way until the next.
    """
    settings = SETTINGS[name]
    late = 1 if name == "acco" else settings.get("delay", TAU)
    number = STEPS if name == "acco" else ROUNDS * settings.get("fragments", 1)
    left = int(name == "acco" or number == ROUNDS)  # of fragments none starts at the last step
    expected = trajectory(rank, world, name, settings)
    for delay in range(late + 1):
        history, forced = on_slow_network(rank, name, settings, lambda n, delay=delay: delay)
        assert_same(history, expected)
        assert len(forced) == number
        if delay == late:
            assert forced == [True] * (number - left) + [False] * left, "waited for when it is due"
        else:
            assert not any(forced), "nobody waits before it is due"
    # SlowNetwork runs a collective on the spot: two at once in different order would hang there.
    apart = 0 if "fragments" in settings else 2
    uneven, _ = on_slow_network(rank, name, settings, lambda n: (n + apart * rank) % (late + 1))
    assert_same(uneven, expected)


@replicas(2)
@pytest.mark.parametrize("name", ["co2", "co2_keep"])
def test_means_of_moments_may_take_a_whole_round(rank: int, world: int, name: str) -> None:
    """They have a collective of their own."""
    expected = trajectory(rank, world, name, MOMENTS[name], "adamw")
    for delay in range(TAU + 1):
        history, forced = on_slow_network(rank, name, MOMENTS[name], lambda n, delay=delay: delay)
        assert len(forced) == 2 * ROUNDS
        assert any(forced) == (delay == TAU)
        assert_same(history, expected)


# Which collectives there are.


def recorded(rank: int, name: str) -> list[tuple[int, str, int, str, bool]]:
    with Recorder() as recorder:
        session = Session(rank, name, SETTINGS[name])
        for _ in range(STEPS):
            recorder.step += 1
            session.step()
            if recorder.step % 5 == 0:
                session.shown()
        session.method.flush()
        session.method.state_dict()
    return recorder.log


@replicas(3)
@pytest.mark.parametrize("name", grid(SETTINGS, OF_A_KIND.__contains__))
def test_ranks_issue_the_same_collectives(rank: int, name: str) -> None:
    first, *others = everybody(recorded(rank, name))
    assert first and others == [first] * 2


@replicas(2)
@pytest.mark.parametrize("name", ["allreduce", *DENSE])
def test_a_round_has_one_collective(rank: int, name: str) -> None:
    log = recorded(rank, name)
    means = ("all_reduce", "allreduce_")  # as our code launches it, and as DDP does
    launched = [step for step, call, *_, background in log if call in means and background]
    due = {
        "allreduce": list(range(1, STEPS + 1)),
        "streaming_diloco": [1, 2, 4, 5, 7, 8, 10, 11, 13, 14],
    }
    if name == "allreduce":
        launched = sorted(set(launched))  # a step has a collective for each of DDP's buckets
    assert launched == due.get(name, [TAU * (t + 1) for t in range(ROUNDS)])
    blocking = {step for step, *_, background in log if step and not background}
    assert blocking == {5, 10, 15}, "between rounds nothing is sent but for a consensus"


@replicas(2)
@pytest.mark.parametrize("name", SPARSE)
def test_a_round_has_one_gathering(rank: int, name: str) -> None:
    log = recorded(rank, name)
    packed = ("all_gather_into_tensor", "torch.uint8")
    gathered = [step for step, call, _, dtype, _ in log if (call, dtype) == packed]
    assert gathered == [TAU * (t + 1) for t in range(ROUNDS)]
    others = {step for step, call, _, dtype, _ in log if step and (call, dtype) != packed}
    assert others == {5, 10, 15}, "of consensuses"
