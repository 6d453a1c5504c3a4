"""A state that is loaded under another method or configuration than it was saved with either goes
on as the new one says, or is refused in one line."""

import copy
from dataclasses import fields
from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn

import co2
from co2.errors import ConfigError
from co2.methods import METHODS
from tests.grids import OF_A_KIND, grid
from tests.methods import problem
from tests.methods.driver import SETTINGS, Session, Snapshot, assert_same, inner
from tests.workers import Pool, replicas

TAU = 3
SHARDED = {**SETTINGS["co2"], "shard": True}
CASES = [*SETTINGS.items(), ("co2", SHARDED)]
CHOICES = {
    "delay": 2,
    "exchange": "int8",
    "gap_penalty": 3.0,
    "clip_mode": "norm",
    "tau_power": 0.0,  # any other would need a schedule
}
"""Other values of keys that may be null or a word."""
KEYS = [(name, field.name) for name, method in METHODS.items() for field in fields(method.Config)]
FREE = [(name, key) for name, key in KEYS if key in METHODS[name].may_change]
ROUNDS_MAY_CHANGE = [(name, s) for name, s in CASES if (name, "tau") in FREE]


def changed(name: str, key: str) -> dict[str, Any]:
    """A method's settings with another value of a key."""
    value = getattr(METHODS[name].Config(**SETTINGS[name]), key)
    if key in CHOICES:
        other: Any = CHOICES[key]
    elif isinstance(value, Enum):
        other = next(one for one in type(value) if one is not value)
    elif isinstance(value, bool):
        other = not value
    else:
        other = value - 1 if isinstance(value, int) else value / 2 or 1.0
    return {**SETTINGS[name], key: other}


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


@replicas(2)
@pytest.mark.parametrize(("name", "settings"), ROUNDS_MAY_CHANGE, ids=str)
def test_a_longer_round_ends_at_the_next_step(
    rank: int, name: str, settings: dict[str, Any]
) -> None:
    """8 of 12 steps, then τ = 4: as if the round had been one of 9."""
    ended = session(rank, name, {**settings, "tau": 9})
    train(ended, 9)
    expected = train(go_on(ended, name, {**settings, "tau": 4}), 8)
    cut = session(rank, name, {**settings, "tau": 12})
    train(cut, 8)
    assert_same(train(go_on(cut, name, {**settings, "tau": 4}), 9), expected)


def goes_on(rank: int, world: int, name: str, key: str) -> list[dict[str, torch.Tensor]]:
    before = session(rank, name, SETTINGS[name])
    shared = []
    for _ in range(2 * TAU):
        before.step()
        after = go_on(before, name, changed(name, key))
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
    after = session(0, name, changed(name, key))
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
