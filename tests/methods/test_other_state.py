"""A state that is loaded under another method or configuration than it was saved with either goes
on as the new one says, or is refused in one line."""

import copy
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

import co2
from co2.errors import ConfigError
from co2.methods import METHODS
from co2.methods.parts.compressed import Compress
from tests.grids import OF_A_KIND, grid
from tests.methods import problem
from tests.methods.driver import SETTINGS, Session, Snapshot, assert_same, inner
from tests.workers import Pool

TAU = 3
SHARDED = {**SETTINGS["co2"], "shard": True}
CASES = [*SETTINGS.items(), ("co2", SHARDED)]
OTHER: dict[str, Any] = {
    "tau": 2,
    "comm_share": 0.3,
    "outer_lr": 0.5,
    "outer_momentum": 0.1,
    "average_moments": True,
    "pull": 0.2,
    "share": 0.9,
    "fragments": 1,
    "delay": 2,
    "mixing": 0.1,
    "exchange": "int8",
    "density": 0.9,
    "error_decay": 0.2,
    "gap_penalty": 3.0,
    "clip": 0.5,
    "clip_mode": "norm",
    "shard": True,
    "blocking_share": 1.0,
    "tau_power": 0.0,
    "keep_local": 0.1,
    "momentum_weight": 0.0,
    "first_moment_every": 5,
    "second_moment_every": 7,
    "slow_beta": 0.5,
    "slow_weight": 0.2,
    "late_momentum": True,
    "decay": 0.3,
    "top_k": 5,
    "block": 3,
    "freeze_step": 2,
    "compress": Compress.update,
    "mask_below": 0.1,
    "kappa": 3,
    "double_every": 3,
    "max_interval": 2,
}
"""Another value of every key of every method."""
KEYS = [(name, field.name) for name, method in METHODS.items() for field in fields(method.Config)]
FREE = [(name, key) for name, key in KEYS if key in METHODS[name].may_change]
ROUNDS_MAY_CHANGE = [(name, s) for name, s in CASES if (name, "tau") in FREE]


def session(rank: int, name: str, settings: dict[str, Any]) -> Session:
    return Session(rank, name, settings, inner(name, "adamw"), scheduled=False)


def go_on(before: Session, name: str, settings: dict[str, Any]) -> Session:
    """What another session has trained so far, under other settings."""
    after = session(before.rank, name, settings)
    after.net.load_state_dict(before.net.state_dict())
    after.optimizer.load_state_dict(before.optimizer.state_dict())
    after.method.load_state_dict(copy.deepcopy(before.method.state_dict()))
    after.steps_done = before.steps_done
    return after


def train(trained: Session, steps: int) -> Snapshot:
    for _ in range(steps):
        trained.step()
    return trained.snapshot()


def ends_a_long_round(rank: int, world: int, name: str, settings: dict[str, Any]) -> None:
    ended = session(rank, name, {**settings, "tau": 9})
    train(ended, 9)
    expected = train(go_on(ended, name, {**settings, "tau": 4}), 8)
    cut = session(rank, name, {**settings, "tau": 12})
    train(cut, 8)
    assert_same(train(go_on(cut, name, {**settings, "tau": 4}), 9), expected)


@pytest.mark.parametrize(("name", "settings"), ROUNDS_MAY_CHANGE, ids=str)
def test_a_longer_round_ends_at_the_next_step(
    workers: Pool, name: str, settings: dict[str, Any]
) -> None:
    """8 of 12 steps, then τ = 4: as if the round had been one of 9."""
    workers.run(ends_a_long_round, 2, name, settings)


def goes_on(rank: int, world: int, name: str, key: str) -> list[dict[str, torch.Tensor]]:
    settings = SETTINGS[name]
    before = session(rank, name, settings)
    shared = []
    for _ in range(2 * TAU):
        before.step()
        after = go_on(before, name, {**settings, key: OTHER[key]})
        sent = after.method.stats().bytes_sent
        train(after, 2 * TAU)
        assert after.method.stats().bytes_sent > sent
        tensors = after.method.saved_tensors()
        shared.append({at: tensors[at].clone() for at in ("anchor", "center") if at in tensors})
    return shared


@pytest.mark.parametrize(("name", "key"), grid(FREE, lambda pair: pair[0] in OF_A_KIND), ids=str)
def test_a_key_that_may_change(workers: Pool, name: str, key: str) -> None:
    """What the replicas share stays equal on both, wherever in a round the value changes."""
    first, second = workers.run(goes_on, 2, name, key)
    assert_same(first, second)


@pytest.mark.parametrize(("name", "key"), [pair for pair in KEYS if pair not in FREE], ids=str)
def test_a_key_that_may_not(name: str, key: str) -> None:
    before = session(0, name, SETTINGS[name])
    before.step()
    after = session(0, name, {**SETTINGS[name], key: OTHER[key]})
    untouched = copy.deepcopy(after.method.saved_tensors())
    with pytest.raises(ConfigError, match=f"{name}.{key}=.* saved with"):
        after.method.load_state_dict(before.method.state_dict())
    assert_same(after.method.saved_tensors(), untouched)
    assert after.method.steps == 0


PAIRS = (("slowmo", "local_sgd"), ("slowmo", "diloco"), ("diloco", "slowmo"), ("co2", "allreduce"))


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_another_method(saved: str, loaded: str) -> None:
    before, after = (session(0, name, SETTINGS[name]) for name in (saved, loaded))
    with pytest.raises(ConfigError) as error:
        after.method.load_state_dict(before.method.state_dict())
    assert f"method={loaded}: the state was saved by {saved}" in str(error.value)


@pytest.mark.parametrize("state", [None, [], {}, {"steps": 3}], ids=repr)
def test_what_is_no_state(state: Any) -> None:
    with pytest.raises(ConfigError, match=r"^state=.*: is no state that a method"):
        session(0, "co2", SETTINGS["co2"]).method.load_state_dict(state)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("added", [False, True], ids=["unfrozen", "added"])
def test_a_parameter_trained_since_prepare(name: str, added: bool) -> None:
    """Nobody would synchronize it: the next step refuses, by its name."""
    net, optimizer = problem.build(0, inner(name), torch.float64)
    late: nn.Parameter = net.enter.weight
    if added:
        late = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        net.register_parameter("late", late)
    else:
        late.requires_grad_(False)
    method = METHODS[name](METHODS[name].Config(**SETTINGS[name]))
    model = method.prepare(net, optimizer, co2.Mesh.world())
    problem.backward(model, 0, 0)
    method.step()
    late.requires_grad_(True)
    if added:
        optimizer.add_param_group({"params": [late]})
    of = next(at for at, param in net.named_parameters() if param is late)
    with pytest.raises(ConfigError, match=f"parameter={of}: was not trained .* before prepare"):
        method.step()
