"""Rounds whose length follows the learning rate (`tau_power`)."""

import itertools
import math
from typing import Any

import pytest
import torch

from co2.errors import ConfigError
from co2.methods.base import ELASTIC, QUORUM
from co2.methods.diloco import DiLoCo
from co2.methods.local_sgd import LocalSGD
from co2.methods.shared.rounds import round_ends
from tests.methods import problem
from tests.methods.driver import SETTINGS, Session, assert_same
from tests.methods.test_equals_reference import replicas_of
from tests.reference import REFERENCES
from tests.workers import Pool

STEPS = 24
POWER = 2.0


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


def trained(rank: int, world: int, name: str, stop: int | None) -> list[dict[str, torch.Tensor]]:
    settings = {**SETTINGS[name], "tau_power": POWER}
    session = Session(rank, name, settings, total=STEPS)
    history = []
    for step in range(STEPS):
        if step == stop:
            state = session.method.state_dict()
            again = Session(rank, name, settings, seed=rank + 50, total=STEPS)
            again.net.load_state_dict(session.net.state_dict())
            again.optimizer.load_state_dict(session.optimizer.state_dict())
            again.method.load_state_dict(state)
            again.steps_done, session = step, again
        session.step()
        history.append(session.snapshot())
    session.method.flush()
    return history


@pytest.mark.parametrize("name", ["local_sgd", "slowmo", "diloco"])
def test_equals_reference(workers: Pool, name: str) -> None:
    """The references train rounds of any length, one after the other."""
    measured = workers.run(trained, 2, name, None)
    replicas = replicas_of("sgd", 2, torch.float64)

    def rate(step: int) -> float:
        return max(problem.rates(replicas[0].optimizer, step))

    ends = round_ends(rate, STEPS, SETTINGS[name]["tau"], POWER)
    assert len(set(lengths(rate, STEPS, SETTINGS[name]["tau"], POWER))) > 1
    train = type(replicas[0]).train
    upcoming: list[int] = []
    for replica in replicas:
        replica.train = lambda tau, one=replica: train(one, upcoming[0])  # type: ignore[method-assign]
    rounds = REFERENCES[name](replicas, **SETTINGS[name])
    done = 0
    for end in ends:
        upcoming[:] = [end - done]
        next(rounds)
        done = end
        for history, replica in zip(measured, replicas, strict=True):
            torch.testing.assert_close(
                history[end - 1], problem.snapshot(replica.model), rtol=1e-12, atol=1e-12
            )


def test_stop_and_go_on(workers: Pool) -> None:
    expected = workers.run(trained, 2, "diloco", None)
    for stop in range(4, 12):
        found = workers.run(trained, 2, "diloco", stop)
        assert_same(found, expected)


def test_refused() -> None:
    with pytest.raises(ConfigError, match="tau_power=-1"):
        LocalSGD.Config(tau_power=-1)
    with pytest.raises(ConfigError, match="tau_power=1: must be 0 with tau=auto"):
        DiLoCo.Config(tau="auto", tau_power=1)
    refused = DiLoCo(DiLoCo.Config(tau_power=1)).refusals()
    assert {ELASTIC, QUORUM} <= refused.keys()
    with pytest.raises(ConfigError, match=r"local_sgd.tau_power=1\.0: needs the learning rate"):
        Session(0, "local_sgd", {"tau_power": 1.0})
