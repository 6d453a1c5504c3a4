"""What every method refuses, in one line: values beyond its limits, ways to travel, and inner
optimizers; and what it does not refuse, it does. A method is covered by being in the registry."""

from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import co2
from co2.config import CommConfig, CommDevice, Precision
from co2.errors import ConfigError
from co2.limits import choices, fits, limits
from co2.methods import METHODS
from co2.methods.base import BF16, HOST
from tests.grids import OF_A_KIND, grid, nonempty
from tests.methods import problem
from tests.methods.driver import (
    ADAM,
    FP32_ONLY,
    MOMENTS,
    NEEDS_SGD,
    SETTINGS,
    SHARDED,
    Case,
    Snapshot,
    inner,
    trajectory,
)
from tests.workers import replicas

TAU = 3
KEYS = nonempty((name, key) for name, method in METHODS.items() for key in limits(method.Config))
WIRES = {
    BF16: CommConfig(dtype=Precision.bf16),
    HOST: CommConfig(device=CommDevice.cpu),
}


def edges(hint: Any) -> list[Any]:
    """Values at the limits of an annotation, and just beyond them."""
    found: list[Any] = [None, True, -1, 0, 1, 0.5, 2, "typo", [1]]
    for kind, among in choices(hint):
        if isinstance(kind, type) and issubclass(kind, Enum):
            found += kind
        elif among is not None:
            found += [kind(end + way) for end in (among.low, among.high) for way in (-1, 0, 1)
                      if end + way < float("inf")]  # fmt: skip
    return found


@pytest.mark.parametrize(("name", "key"), KEYS)
def test_a_setting_keeps_its_limits(name: str, key: str) -> None:
    """As they are declared. Beside them there are limits between settings, of `BETWEEN`."""
    hint = limits(METHODS[name].Config)[key]
    for value in edges(hint):
        settings = {**SETTINGS[name], key: value}
        if not fits(value, hint):
            with pytest.raises(ConfigError, match=rf"^{key}=[^\n]*: must be [^\n]*$"):
                METHODS[name].Config(**settings)
            continue
        try:
            made = METHODS[name].Config(**settings)
        except ConfigError:
            assert (name, key) in DEPENDS, value
        else:
            assert getattr(made, key) == value


DEPENDS = {("noloco", "pull"), ("streaming_diloco", "tau")}
"""Settings of which not every value goes with every other's."""
BETWEEN: list[tuple[str, str, Any, Any]] = [
    ("co2_keep", "delay", 3, 4),
    ("streaming_diloco", "fragments", 3, 4),
    ("streaming_diloco", "delay", 2, 3),
    ("noloco", "pull", 1.49, 1.5),  # β = 0.5: γ < 1.5
]
"""Limits that depend on other settings: the last value that is accepted, and one that is not."""


@pytest.mark.parametrize(("name", "key", "accepted", "refused"), BETWEEN)
def test_a_setting_keeps_its_limits_beside_others(
    name: str, key: str, accepted: Any, refused: Any
) -> None:
    METHODS[name].Config(**{**SETTINGS[name], key: accepted})
    with pytest.raises(ConfigError, match=rf"^{key}={refused}: must be [^\n]*$"):
        METHODS[name].Config(**{**SETTINGS[name], key: refused})


REFUSING = {
    BF16: {*FP32_ONLY, *ADAM, *NEEDS_SGD, "co2 in parts", "int4"},
    HOST: {*ADAM, *NEEDS_SGD, "sparta", "acco", "allreduce", "co2 in parts"},
}
"""How collectives travel, and what cannot take it."""
TRAVELLING: dict[str, Case] = {
    **{name: (name, settings) for name, settings in SETTINGS.items()},
    "co2 in parts": SHARDED[0],
    "int4": ("streaming_diloco", {**SETTINGS["streaming_diloco"], "exchange": "int4"}),
}


@pytest.mark.parametrize("kind", TRAVELLING)
@pytest.mark.parametrize("wire", REFUSING)
def test_a_way_to_travel_is_refused_or_taken(kind: str, wire: str) -> None:
    name, settings = TRAVELLING[kind]
    if kind not in REFUSING[wire]:
        METHODS[name](METHODS[name].Config(**settings), WIRES[wire])
        return
    with pytest.raises(ConfigError, match=rf"^{wire}: method={name}: .*; use "):
        METHODS[name](METHODS[name].Config(**settings), WIRES[wire])


def moved(one: Snapshot, other: Snapshot) -> float:
    """Distance between two states of the trained weights."""
    names = ("enter.weight", "middle.weight", "leave.weight", "leave.bias")
    return sum((one[name] - other[name]).square().sum().item() for name in names) ** 0.5


@replicas()
@pytest.mark.parametrize("world", grid([1, 3], (3).__eq__))
@pytest.mark.parametrize(
    "name",
    grid([name for name in SETTINGS if name not in REFUSING[BF16]], OF_A_KIND.__contains__),
)
def test_over_bf16_the_trajectory_stays_close(rank: int, world: int, name: str) -> None:
    """Every displacement is off by at most 2^-8 of itself for each of the G roundings, and what it
    moves passes that on: together less than 3 % of the way made."""
    start = problem.snapshot(problem.build(0, inner(name), torch.float32)[0])
    arguments = (rank, world, name, SETTINGS[name], inner(name), torch.float32)
    plain, rounded = (trajectory(*arguments, comm=comm)[-1] for comm in (None, WIRES[BF16]))
    assert moved(plain, rounded) < 0.03 * moved(plain, start)
    same = world == 1 and name == "allreduce"  # alone, DDP sends nothing
    assert (moved(plain, rounded) == 0) == same


ADAMS = {"adam", "adamw"}
TAKES: dict[str, set[str]] = {
    **dict.fromkeys(ADAM, ADAMS),
    **{name: {"plain", "decay"} for name in NEEDS_SGD},
    "desloc": {*ADAMS, "maximize"},
    "mt_dao": {"adamw"},  # its own gradient is the one that Adam has seen, without weight decay
}
"""The inner optimizers that a method takes, where it does not take all."""
KINDS: dict[str, Any] = {
    **problem.OPTIMIZERS,
    "amsgrad": lambda groups: AdamW(groups, amsgrad=True),
    "maximize": lambda groups: AdamW(groups, maximize=True),
    "ascending": lambda groups: SGD(groups, lr=0.1, maximize=True),
}


@pytest.mark.parametrize("case", [*SETTINGS.items(), *MOMENTS.items()], ids=str)
def test_an_inner_optimizer_is_refused_or_taken(case: Case) -> None:
    name, settings = case
    takes = TAKES.get(name, set(KINDS))
    if "average_moments" in settings:
        takes = {*ADAMS, "maximize"}
    for kind, make in KINDS.items():
        net, _ = problem.build(0, "plain")
        optimizer = make([param for param in net.parameters() if param.requires_grad])
        method = METHODS[name](METHODS[name].Config(**settings))
        if kind in takes:
            method.prepare(net, optimizer, co2.Mesh.world())
            continue
        with pytest.raises(ConfigError, match=rf"^optim.name=\w+: {name}.* (needs|takes) "):
            method.prepare(net, optimizer, co2.Mesh.world())


class OwnRate(torch.optim.Optimizer):
    """Chooses its learning rate itself, as transformers' Adafactor does with relative_step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None, "relative_step": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=0.01)


def stepped(name: str, kind: Any) -> None:
    """A few steps with an optimizer of this kind."""
    model = nn.Linear(2, 1)
    method = METHODS[name](METHODS[name].Config(**SETTINGS[name]))
    method.prepare(model, kind(model.parameters()), co2.Mesh.world(device="cpu"))
    for _ in range(2 * TAU):
        model(torch.ones(3, 2)).square().mean().backward()
        method.step()
        method.optimizer.zero_grad()
    method.flush()


@pytest.mark.parametrize("name", METHODS)
def test_an_optimizer_that_needs_a_closure(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^optimizer=LBFGS: its step needs a closure"):
        stepped(name, torch.optim.LBFGS)


@pytest.mark.parametrize("name", ["slowmo", "co2", "acco", "diloco"])
def test_an_optimizer_that_chooses_its_rate(name: str) -> None:
    """It is refused where the method, or the schedule under this method, needs a rate."""
    if name == "diloco":
        return stepped(name, OwnRate)
    says = r"^optimizer=OwnRate: .*relative_step=False" if name == "acco" else r"^lr=None: .* one$"
    with pytest.raises(ConfigError, match=says):
        stepped(name, OwnRate)
