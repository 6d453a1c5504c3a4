"""CO2's outer step settles where β + α/Λ < 1, and warns where it does not (docs/choosing.md)."""

from pathlib import Path
from typing import Any

import pytest
import torch

import co2
import train
from co2.comm.flat import FlatParams
from co2.methods.shared.outer_step import GapPenalty
from co2.train.schedule import learning_rate

ROUNDS = 60
TAU = 2


def trained(settings: dict[str, object], rates: tuple[float, float]) -> tuple[list[float], list]:
    """The starts of all rounds on ½ x² from x = 1, and what the method had to say.

    Plain gradient steps at rate 1 solve it at once, so a round removes all of the distance, K = 1.
    The rates are those of the first and of the last round.
    """
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    model = torch.nn.ParameterList([weight])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    method = co2.CO2(co2.CO2.Config(tau=TAU, **settings))  # type: ignore[arg-type]
    method.prepare(model, optimizer, co2.Mesh.world())
    starts, notices = [], []
    for number in range(ROUNDS):
        share = number / (ROUNDS - 1)
        for group in optimizer.param_groups:
            group["lr"] = rates[0] ** (1 - share) * rates[1] ** share
        for _ in range(TAU):
            weight.grad = weight.detach().clone()
            method.step()
        notices += method.notices()
        starts.append(weight.item())
    method.flush()
    return starts, notices


@pytest.mark.parametrize(
    ("gap", "beta", "alpha"),
    [(2.0, 0.2, 1.0), (3.0, 0.4, 1.0), ("none", 0.2, 0.7), ("gap_aware_steady", 0.2, 1.0)],
)
def test_below_one_it_settles(gap: str | float, beta: float, alpha: float) -> None:
    settings = {"gap_penalty": gap, "outer_momentum": beta, "outer_lr": alpha}
    starts, notices = trained(settings, (1.0, 1.0))
    assert abs(starts[-1]) < 0.05 and notices == []


@pytest.mark.parametrize(("gap", "beta", "alpha"), [("none", 0.2, 1.0), (2.0, 0.6, 1.0)])
def test_above_one_it_does_not_and_says_so_once(
    gap: str | float, beta: float, alpha: float
) -> None:
    settings = {"gap_penalty": gap, "outer_momentum": beta, "outer_lr": alpha}
    starts, notices = trained(settings, (1.0, 1.0))
    assert max(map(abs, starts[-6:])) > max(map(abs, starts[6:12])) > 1
    (notice,) = notices
    assert f"{beta:g} + {alpha:g}/" in notice and "not below 1" in notice


def test_the_gap_fades_with_the_rate_and_the_steady_one_does_not() -> None:
    """At .9 and .5 a round of two steps still removes 99 and 75 % of the distance."""
    settings = {"outer_momentum": 0.2, "outer_lr": 1.0}
    _, faded = trained({"gap_penalty": "gap_aware", **settings}, (1.0, 0.1))
    _, steady = trained({"gap_penalty": "gap_aware_steady", **settings}, (1.0, 0.1))
    assert len(faded) == 1 and "gap_aware_steady" in faded[0]
    assert steady == []


SHIPPED = [
    f"task={task} scale={scale}{' launch.workers=8 train.batch_size=1' if scale == 'paper' else ''}"
    for path in sorted(Path("conf/task/scale").glob("*.yaml"))
    for task, scale in [path.stem.split("_")]
]


@pytest.mark.parametrize("words", SHIPPED)
def test_what_is_shipped_settles(words: str) -> None:
    """At the last step, too, where the rate is lowest."""
    config = train.APP.config(["resume=never", "method=co2", *words.split()])
    own: Any = config.method_config
    weight = torch.nn.Parameter(torch.ones(1))
    gap = GapPenalty(own.gap_penalty, FlatParams(torch.optim.SGD([weight])))
    gap.observe_lr(1.0)
    last = gap.usual(learning_rate(config.train.steps - 1, config.optim, config.train.steps))
    assert own.outer_momentum + own.outer_lr / last < 1
