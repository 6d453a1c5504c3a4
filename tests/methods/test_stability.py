"""CO2's outer step settles where β + α/Λ < 1, and warns where it does not (docs/choosing.md)."""

import pytest
import torch

import co2

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
