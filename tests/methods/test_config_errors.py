"""A wrong hyper-parameter is refused at once, by its name."""

from typing import Any

import pytest
import torch
from torch import nn

import co2
from co2.config import CommConfig, Precision
from co2.errors import ConfigError
from co2.methods import METHODS
from tests.methods.driver import ADAM, SETTINGS

NAN, INF = float("nan"), float("inf")
ROUNDS = (
    "local_sgd",
    "slowmo",
    "diloco",
    "overlap_local_sgd",
    "cocod_sgd",
    "eager_diloco",
    "sparseloco",
    "noloco",
    "co2",
    "co2_keep",
    "co2_released",
)
EARLY = ("cocod_sgd", "eager_diloco", "overlap_local_sgd", "co2", "co2_keep")
DILOCOS = ("diloco", "streaming_diloco", "eager_diloco")
WRONG: list[tuple[str, str, Any]] = [
    *(("co2_keep", "momentum_weight", value) for value in (-0.1, NAN, INF)),
    *(("co2_keep", "keep_local", value) for value in (-0.1, 1.1, NAN)),
    *(("co2_keep", "delay", value) for value in (-1, 4, 0.5, True)),
    *((name, "tau", value) for name in ROUNDS for value in (0, -3)),
    *(
        (name, "outer_momentum", value)
        for name in ("slowmo", *DILOCOS, "noloco", "overlap_local_sgd", "co2", "co2_keep")
        for value in (1.0, 1.5, -0.1, NAN)
    ),
    *(
        (name, "outer_lr", value)
        for name in ("slowmo", *DILOCOS, "sparseloco", "noloco", "co2")
        for value in (-1.0, NAN, INF)
    ),
    *(("streaming_diloco", "tau", value) for value in (0, -3, "auto", 2.5)),
    *(("streaming_diloco", "fragments", value) for value in (0, 4, True)),
    *(("streaming_diloco", "delay", value) for value in (-1, 3, 0.5)),
    *(("streaming_diloco", "mixing", value) for value in (-0.1, 1.1, NAN)),
    *(("streaming_diloco", "exchange", value) for value in ("int2", "sign", "", None)),
    *(("sparseloco", "density", value) for value in (0.0, -0.1, 1.1, NAN)),
    *(("sparseloco", "error_decay", value) for value in (-0.1, 1.1, NAN)),
    # β = 0.5: γ < 1.5
    *(("noloco", "pull", value) for value in (-0.1, 1.5, NAN)),
    *(("sparta", "share", value) for value in (0.0, -0.1, 1.1, NAN)),
    *(("sparta", "delay", value) for value in (-1, 0.5, True)),
    *(("overlap_local_sgd", "pull", value) for value in (-0.1, 1.1, NAN)),
    *(("co2", "clip", value) for value in (-1.0, NAN)),
    *(("co2", "gap_penalty", value) for value in ("typo", 0.0, -2.0, NAN)),
    ("co2", "clip_mode", "typo"),
    *((name, "blocking_share", value) for name in EARLY for value in (-0.1, 1.1, NAN)),
    *(("co2_released", "gap_penalty", value) for value in (0.0, -2.0, NAN)),
    *(("desloc", "tau", value) for value in (0, -3, "auto", 2.5)),
    *(("desloc", f"{name}_moment_every", 0) for name in ("first", "second")),
    *(("mt_dao", "tau", value) for value in (0, "auto")),
    *(("mt_dao", f"{name}_moment_every", 0) for name in ("first", "second")),
    *(("mt_dao", "slow_beta", value) for value in (-0.1, 1.0, NAN)),
    *(("mt_dao", "slow_weight", value) for value in (-0.1, 1.1, NAN)),
    *(("demo", "decay", value) for value in (-0.1, 1.0, NAN)),
    *(("demo", "top_k", value) for value in (0, 2.5)),
    *(("demo", "block", value) for value in (0, 129)),
    *((name, "freeze_step", value) for name in ADAM for value in (0, -1)),
    *(("zero_one_adam", key, 0) for key in ("kappa", "double_every", "max_interval")),
]
RIGHT: list[tuple[str, str, Any]] = [
    *((name, "tau", 1) for name in ROUNDS),
    *(("streaming_diloco", "tau", value) for value in (2, 500)),
    *(("streaming_diloco", "fragments", value) for value in (1, 3)),
    *(("streaming_diloco", "delay", value) for value in (0, 2)),
    *(("streaming_diloco", "mixing", value) for value in (0.0, 1.0)),
    *(("streaming_diloco", "exchange", value) for value in ("full", "int8", "int4")),
    *(("sparseloco", "density", value) for value in (1e-9, 1.0, 1)),
    *(("sparseloco", "error_decay", value) for value in (0.0, 1.0)),
    *(("noloco", "pull", value) for value in (0.0, 1.49)),
    *(("sparta", "share", value) for value in (1e-9, 1.0, 1)),
    *(("sparta", "delay", value) for value in (0, 10)),
    *(("mt_dao", "slow_weight", value) for value in (0.0, 1.0)),
    *((name, "outer_momentum", 0.0) for name in ("slowmo", "overlap_local_sgd", "co2")),
    *(("co2", "clip", value) for value in (None, 0.0, 5.0)),
    *(
        ("co2", "gap_penalty", value)
        for value in ("none", "gap_aware", "gap_aware_steady", "gap_aware_elementwise", 2.0)
    ),
    *(("co2", "clip_mode", value) for value in ("value", "norm")),
    *(("co2", "shard", value) for value in (True, False)),
    *((name, "blocking_share", value) for name in EARLY for value in (0.0, 0.1, 1.0)),
]


@pytest.mark.parametrize(("name", "key", "value"), WRONG)
def test_refused(name: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        METHODS[name].Config(**{**SETTINGS[name], key: value})
    assert caught.value.key == key
    assert str(caught.value).startswith(f"{key}={value}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "key", "value"), RIGHT)
def test_accepted(name: str, key: str, value: Any) -> None:
    assert getattr(METHODS[name].Config(**{**SETTINGS[name], key: value}), key) == value


def test_a_late_momentum_comes_at_the_ends_of_rounds() -> None:
    for every in (2, 7):
        hint = rf"^first_moment_every={every}: must be a multiple of tau, which is 3"
        with pytest.raises(ConfigError, match=hint):
            co2.MTDAO.Config(tau=3, first_moment_every=every, late_momentum=True)
    co2.MTDAO.Config(tau=3, first_moment_every=6, late_momentum=True)


def test_what_is_sharded_does_not_travel_in_bf16() -> None:
    with pytest.raises(ConfigError, match=r"^comm\.dtype=bf16: must be fp32 with co2\.shard=true"):
        co2.CO2(co2.CO2.Config(shard=True), CommConfig(dtype=Precision.bf16))
    co2.CO2(co2.CO2.Config(shard=True), CommConfig(dtype=Precision.fp32))
    co2.CO2(co2.CO2.Config(shard=False), CommConfig(dtype=Precision.bf16))


def test_what_is_quantized_does_not_travel_in_bf16() -> None:
    method, bf16 = co2.StreamingDiLoCo, CommConfig(dtype=Precision.bf16)
    with pytest.raises(ConfigError, match=r"^comm\.dtype=bf16: must be fp32 with .*=int4"):
        method(method.Config(exchange="int4"), bf16)
    method(method.Config(), bf16)


@pytest.mark.parametrize("name", METHODS)
def test_defaults_are_right(name: str) -> None:
    METHODS[name].Config()


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
