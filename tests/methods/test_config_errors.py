"""A wrong hyper-parameter is refused at once, by its name."""

from typing import Any

import pytest
import torch
from torch import nn

import co2
from co2.config import CommConfig, CommDevice, Precision
from co2.errors import ConfigError
from co2.methods import METHODS
from tests.methods.driver import SETTINGS

# Beside the limits of each setting, which tests/engine/test_limits.py has.
WRONG: list[tuple[str, str, Any]] = [
    ("co2_keep", "delay", 4),
    *(("streaming_diloco", key, 4) for key in ("fragments", "delay")),
    ("noloco", "pull", 1.5),  # β = 0.5: γ < 1.5
]
RIGHT: list[tuple[str, str, Any]] = [
    ("co2_keep", "delay", 3),
    ("streaming_diloco", "fragments", 3),
    ("streaming_diloco", "delay", 2),
    ("noloco", "pull", 1.49),
]


@pytest.mark.parametrize(("name", "key", "value"), WRONG)
def test_refused(name: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}={value}: must be [^\n]*$"):
        METHODS[name].Config(**{**SETTINGS[name], key: value})


@pytest.mark.parametrize(("name", "key", "value"), RIGHT)
def test_accepted(name: str, key: str, value: Any) -> None:
    METHODS[name].Config(**{**SETTINGS[name], key: value})


def test_a_late_momentum_comes_at_the_ends_of_rounds() -> None:
    for every in (2, 7):
        hint = rf"^first_moment_every={every}: must be a multiple of tau, which is 3"
        with pytest.raises(ConfigError, match=hint):
            co2.MTDAO.Config(tau=3, first_moment_every=every, late_momentum=True)
    co2.MTDAO.Config(tau=3, first_moment_every=6, late_momentum=True)


BF16, HOST = CommConfig(dtype=Precision.bf16), CommConfig(device=CommDevice.cpu)
SIGNS = {"onebit_adam", "zero_one_adam"}
TRAVELS = (
    (BF16, {"demo", "noloco", "sparseloco", "sparta", *SIGNS}),
    (HOST, {"acco", "allreduce", "demo", "sparta", *SIGNS}),
)
"""How collectives travel, and the methods that cannot take it."""


@pytest.mark.parametrize(("comm", "refusing"), TRAVELS, ids=["bf16", "host"])
def test_how_collectives_travel(comm: CommConfig, refusing: set[str]) -> None:
    for name in METHODS.keys() - refusing:
        METHODS[name](comm=comm)
    for name in refusing:
        with pytest.raises(ConfigError, match=rf"^comm\.\w+=(bf16|cpu): method={name}: .*; use "):
            METHODS[name](comm=comm)


@pytest.mark.parametrize("comm", [BF16, HOST], ids=["bf16", "host"])
def test_what_is_sharded_or_quantized_travels_otherwise(comm: CommConfig) -> None:
    with pytest.raises(ConfigError, match=r"method=co2: with co2\.shard=true weights .*; use "):
        co2.CO2(co2.CO2.Config(shard=True), comm)
    quantized = co2.StreamingDiLoCo.Config(exchange="int4")
    if comm is HOST:
        co2.StreamingDiLoCo(quantized, comm)
    else:
        with pytest.raises(ConfigError, match=r"exchange=int4 is less already; use fp32$"):
            co2.StreamingDiLoCo(quantized, comm)


def trained(name: str, kind: Any, steps: int = 6) -> None:
    """A few steps with an optimizer of this kind."""
    model = nn.Linear(2, 1)
    method = METHODS[name](METHODS[name].Config(**SETTINGS[name]))
    method.prepare(model, kind(model.parameters()), co2.Mesh.world(device="cpu"))
    for _ in range(steps):
        model(torch.ones(3, 2)).square().mean().backward()
        method.step()
        method.optimizer.zero_grad()
    method.flush()


@pytest.mark.parametrize("name", METHODS)
def test_an_optimizer_that_needs_a_closure(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^optimizer=LBFGS: its step needs a closure"):
        trained(name, torch.optim.LBFGS)


class OwnRate(torch.optim.Optimizer):
    """Chooses its learning rate itself, as transformers' Adafactor does with relative_step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None, "relative_step": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=0.01)


@pytest.mark.parametrize("name", ["slowmo", "co2", "acco", "diloco"])
def test_an_optimizer_that_chooses_its_rate(name: str) -> None:
    """It is refused where the method, or the schedule under this method, needs a rate."""
    says = {"acco": r"^optimizer=OwnRate: .*relative_step=False", "diloco": None}
    expected = says.get(name, r"^lr=None: .* give OwnRate one$")
    if expected is None:
        return trained(name, OwnRate)
    with pytest.raises(ConfigError, match=expected):
        trained(name, OwnRate)
