"""Round starts, and what consensus shows at the rounds' ends, that fit on the back of an envelope,
for every method and for its reference.

The weights start at 0 and move by given displacements, through SGD without momentum on gradients
that are set by hand. Everything expected here was typed, not computed by the code under test.
"""

from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import co2
from co2.config import CommConfig, CommDevice, Precision
from co2.methods import METHODS
from tests.grids import nonempty
from tests.methods.network import late, no_gpu_needed
from tests.reference import REFERENCES
from tests.reference.replica import Replica, mean
from tests.workers import replicas

Vector = tuple[float, ...]


@dataclass
class Case:
    name: str
    method: str
    settings: dict[str, Any]
    gradients: list[list[Vector]]
    """By replica, by round: what each of the round's inner steps has as gradient."""
    expected: list[list[Vector]]
    """By replica, by round: the weights after it."""
    lr: list[Vector] = field(default_factory=lambda: [(1.0,)])
    """By round: the inner rate of every step, or one for all. The last round's goes on."""
    shown: list[Vector] | None = None
    """By round: what consensus shows after it; None for the mean of the weights."""
    slope: float = 0.0
    """A gradient is this times the weight more than what `gradients` has."""
    momentum: float = 0.0
    """Of the inner optimizer."""
    joined: bool = False
    """Whether all elements are one parameter's. Where they are not, norms are seen to be over all
    parameters."""

    def __str__(self) -> str:
        return f"{self.method}: {self.name}"

    @property
    def tau(self) -> int:
        return self.settings.get("tau", 1)

    def at(self, table: list[Vector], step: int) -> Vector:
        return table[min(step // self.tau, len(table) - 1)]

    def consensus(self) -> list[Vector]:
        """By round: what consensus shows after it."""
        means = torch.tensor(self.expected, dtype=torch.float64).mean(dim=0)
        return self.shown or [tuple(weights) for weights in means.tolist()]

    def backward(self, model: nn.Module, step: int, replica: int) -> None:
        gradient = torch.tensor(self.at(self.gradients[replica], step), dtype=torch.float64)
        weights = list(model.parameters())
        for weight, part in zip(weights, gradient.split([*map(len, weights)]), strict=True):
            weight.grad = self.slope * weight.detach() + part

    def rate(self, step: int) -> float:
        rates = self.at(self.lr, step)
        return rates[step % self.tau % len(rates)]

    def set_lr(self, optimizer: Optimizer, step: int) -> None:
        optimizer.param_groups[0]["lr"] = self.rate(step)

    def build(self) -> tuple[nn.Module, Optimizer]:
        zeros = torch.zeros(len(self.gradients[0][0]), dtype=torch.float64)
        parts = [zeros] if self.joined else zeros.split(1)
        model = nn.ParameterList([nn.Parameter(part.clone()) for part in parts])
        return model, SGD(model.parameters(), lr=1.0, momentum=self.momentum)


def scalars(*values: float) -> list[Vector]:
    return [(value,) for value in values]


ONE = [scalars(0.5)]  # two inner steps a round: displacement 1
PAIR: list[list[Vector]] = [[(1, 1)]]  # of two weights
HALVED = {"tau": 4, "fragments": 2}
NEXT = 10 / 29  # the gap penalty's second displacement: 1/2.9


def co2_case(
    name: str, gradients: list[list[Vector]], expected: list[list[Vector]], **settings: Any
) -> Case:
    lr = settings.pop("lr", [(1.0,)])
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0, "gap_penalty": "none", "clip": None}
    shown = settings.pop("shown")  # a displacement away from the weights of the round before
    return Case(name, "co2", {"tau": 2, **plain, **settings}, gradients, expected, lr, shown)


def keep_case(
    name: str, gradients: list[list[Vector]], expected: list[list[Vector]], **settings: Any
) -> Case:
    plain = {"tau": 2, "fragments": 1, "outer_momentum": 0.0, "momentum_weight": 0.0}
    shown = settings.pop("shown", None)
    return Case(name, "co2_keep", {**plain, **settings}, gradients, expected, shown=shown)


def slowmo_case(name: str, expected: list[list[Vector]], lr: list[Vector], alpha: float) -> Case:
    settings = {"tau": 4, "outer_lr": alpha, "outer_momentum": 0.5}
    return Case(name, "slowmo", settings, [scalars(1.0)], expected, lr)


def streaming_case(delay: int, mixing: float, *expected: Vector) -> Case:
    """Of two layers, whose fragments sync at the steps 3, 9, 15 and 6, 12, 18."""
    settings = {"tau": 6, "fragments": 2, "delay": delay, "mixing": mixing}
    settings |= {"outer_lr": 2.0, "outer_momentum": 0.0}
    return Case(f"{delay}, {mixing}", "streaming_diloco", settings, [[(2, 2)]] * 2,
                [[*expected]] * 2)  # fmt: skip


def sparta_case(delay: int, *expected: list[Vector]) -> Case:
    """Each step moves one weight by -1 on replica 0 and by -3 on replica 1."""
    settings = {"share": 1.0, "delay": delay}
    return Case(f"{delay}", "sparta", settings, [scalars(1), scalars(3)], [*expected])


def acco_case(
    name: str, halves: list[tuple[float, float]], expected: list[Vector], **more: Any
) -> Case:
    """By replica: the gradients of its first and of its second halves. The weights after each half
    are x_0, x̃_1, x_1, x̃_2, x_2, …"""
    return Case(name, "acco", {}, [scalars(*pair * 4) for pair in halves], [expected] * len(halves),
                **more)  # fmt: skip


def demo_case(
    name: str, decay: float, gradients: list[list[Vector]], expected: list[Vector]
) -> Case:
    settings = {"decay": decay, "top_k": 1, "block": 64}
    return Case(name, "demo", settings, gradients, [expected] * len(gradients), joined=True)


def few_case(decay: float, expected: list[Vector]) -> Case:
    """A weight of two elements moves by 4 and 1 in a round, of which one is sent."""
    settings = {"tau": 2, "density": 0.5, "outer_lr": 1.0, "error_decay": decay}
    name = f"one of two elements, {decay:g}"
    return Case(name, "sparseloco", settings, [[(2, 0.5)]], [expected], joined=True)


ROOT = sqrt(0.5)
ZEROS = (0.0, 0.0)

CASES = [
    Case("mean of two", "local_sgd", {"tau": 2}, [scalars(0.5), scalars(1.5)],
         [scalars(-2, -4, -6)] * 2),
    slowmo_case("constant rate", [scalars(-0.4, -1.0, -1.7, -2.45)], [(0.1,)], 1.0),
    slowmo_case("decaying rate", [scalars(-4, -4.6, -5.3)], [(1.0,), (0.1,)], 1.0),
    slowmo_case("outer rate", [scalars(-0.2, -0.5, -0.85)], [(0.1,)], 0.5),
    slowmo_case("first round at rate 0", [scalars(0, -0.4, -1.0)], [(0.0,), (0.1,)], 1.0),
    # m = 4; then d = .3, unscaled: m = 2 + .3, x = -.2 - .5 * .3; then m = 1.15 + 4
    slowmo_case("a round that ends at rate 0", [scalars(-0.2, -0.35, -0.6075)],
                [(0.1,), (0.1, 0.1, 0.1, 0.0), (0.1,)], 0.5),
    Case("no momentum", "overlap_local_sgd", {"tau": 2, "pull": 0.6, "outer_momentum": 0.0},
         [scalars(0.5), scalars(1.5)],
         [scalars(-0.4, -1.04, -1.776), scalars(-1.2, -2.16, -3.024)],
         shown=scalars(-2, -2.8, -3.6)),
    # means -.5, -1, -1.625; v = .5, .75, .75; z = -.5, -1.25, -2
    Case("anchor momentum", "overlap_local_sgd", {"tau": 2, "pull": 0.5, "outer_momentum": 0.5},
         ONE, [scalars(-0.5, -1.0, -1.625, -2.3125)], shown=scalars(-1, -1.5, -2, -2.625)),
    Case("two keep their disagreement of a round", "cocod_sgd", {"tau": 2},
         [scalars(0.5), scalars(1.5)],
         [scalars(-1, -3, -5, -7), scalars(-3, -5, -7, -9)]),
    # replica 0 moves only in round 0, replica 1 only in round 1; each learns of it a round later
    Case("news travel one round", "cocod_sgd", {"tau": 2},
         [scalars(1, 0, 0, 0), scalars(0, 2, 0, 0)],
         [scalars(-2, -1, -3, -3), scalars(0, -5, -3, -3)]),
    Case("the paper's rates", "diloco", {"tau": 2, "outer_lr": 0.7, "outer_momentum": 0.9},
         ONE, [scalars(-1.33, -3.227, -5.6343, -8.50087)]),
    # displacement 2, v = 2, 3, 3.5: each round moves by .5 (2 + .5 v)
    Case("mean of two", "diloco", {"tau": 2, "outer_lr": 0.5, "outer_momentum": 0.5},
         [scalars(0.5), scalars(1.5)], [scalars(-1.5, -3.25, -5.125)] * 2),
    Case("alone", "eager_diloco", {"tau": 2, "outer_lr": 0.7, "outer_momentum": 0.9},
         ONE, [scalars(-1.33, -3.227, -5.6343, -8.50087)]),
    # Delta = .5, then 1; v = .5, 1.45, 2.305
    Case("two alike", "eager_diloco", {"tau": 2, "outer_lr": 0.7, "outer_momentum": 0.9},
         ONE * 2, [scalars(-0.665, -2.2785, -4.43065)] * 2),
    Case("two keep half their disagreement", "eager_diloco",
         {"tau": 2, "outer_lr": 1.0, "outer_momentum": 0.0}, [scalars(0.5), scalars(1.5)],
         [scalars(-0.5, -2.5, -4.5), scalars(-1.5, -3.5, -5.5)]),
    # replica 0 moves by 4 in round 0 only, replica 1 in round 1 only
    Case("news travel one round", "eager_diloco",
         {"tau": 2, "outer_lr": 1.0, "outer_momentum": 0.0},
         [scalars(2, 0, 0, 0), scalars(0, 2, 0, 0)],
         [scalars(-2, -2, -4, -4), scalars(0, -4, -4, -4)]),
    Case("a weight of one element is sent", "sparseloco",
         {"tau": 2, "density": 0.02, "outer_lr": 1.0, "error_decay": 0.95},
         [scalars(0.5), scalars(1.5)], [scalars(-2, -4, -6)] * 2),
    Case("outer rate", "sparseloco",
         {"tau": 2, "density": 0.02, "outer_lr": 0.5, "error_decay": 0.0},
         ONE, [scalars(-0.5, -1.0, -1.5)]),
    # bf16 has no number between 1 and 1 + 1/128: the errors 1/512, 1/256, -1/512 are sent later
    Case("a rounding comes later", "sparseloco",
         {"tau": 1, "density": 0.02, "outer_lr": 1.0, "error_decay": 1.0},
         [scalars(513 / 512)], [scalars(-1, -2, -3 - 1 / 128, -4 - 1 / 128)]),
    # halves of them: 1/512, then 1/1024 + 1/512
    Case("half of a rounding does", "sparseloco",
         {"tau": 1, "density": 0.02, "outer_lr": 1.0, "error_decay": 0.5},
         [scalars(513 / 512)], [scalars(-1, -2, -3, -4)]),
    # The errors of the second element: 1, 2, 3, 4, 5. At 4 there is a tie, and the first goes.
    few_case(1.0, [(-4, 0), (-8, 0), (-12, 0), (-16, 0), (-16, -5), (-24, -5)]),
    # 1, 1.5, 1.75, …: it never comes to 4.
    few_case(0.5, [(-4, 0), (-8, 0), (-12, 0), (-16, 0), (-20, 0), (-24, 0)]),
    few_case(0.0, [(-4, 0), (-8, 0), (-12, 0), (-16, 0), (-20, 0), (-24, 0)]),
    Case("mean of two", "noloco",
         {"tau": 2, "outer_lr": 0.7, "outer_momentum": 0.5, "pull": 0.7},
         [scalars(0.5), scalars(1.5)], [scalars(-1.4, -3.5, -5.95)] * 2),
    # Pairs: 1 and 2, 1 and 2, 0 and 1, 1 and 2.
    # m = -4, -2, 0.5, 0.25; 0, 0, -1.5, -0.375; then -0.375
    Case("news travel from pair to pair", "noloco",
         {"tau": 2, "outer_lr": 1.0, "outer_momentum": 0.5, "pull": 0.5},
         [scalars(2, 0), scalars(0), scalars(0)],
         [scalars(-4, -6, -5.5, -5.25), scalars(0, 0, -1.5, -1.875), scalars(0, 0, 0, -0.375)]),
    keep_case("SlowMo's starts", ONE, [scalars(-1, -2.5, -4.25, -6.125)],
              keep_local=1.0, outer_momentum=0.5, momentum_weight=0.5),
    # from round 1 on half a round stays behind
    keep_case("half is keep_local", ONE, [scalars(-1, -1.5, -2.5, -3.5)], keep_local=0.5,
              shown=scalars(-1, -2, -3, -4)),
    # after step 3 at -1 - .25, after step 5 at -2 - .25
    keep_case("half is kept of one step", ONE, [scalars(-1, -1.75, -2.75, -3.75)],
              keep_local=0.5, delay=1, shown=scalars(-1, -2, -3, -4)),
    keep_case("all is kept of one step", ONE, [scalars(-1, -2, -3, -4)], keep_local=1.0, delay=1),
    keep_case("DiLoCo's Nesterov", ONE, [scalars(-1.5, -3.25, -5.125)],
              keep_local=0.0, delay=0, outer_momentum=0.5, momentum_weight=0.5),
    keep_case("two keep half their disagreement", [scalars(0.5), scalars(1.5)],
              [scalars(-1, -2.5, -4.5, -6.5), scalars(-3, -3.5, -5.5, -7.5)], keep_local=0.5,
              shown=scalars(-2, -4, -6, -8)),
    # u = 0, -2, -3, -3.5: CoCoD-SGD's rounds, and half of u
    keep_case("two keep their disagreement", [scalars(0.5), scalars(1.5)],
              [scalars(-1, -4, -7.5, -11.25), scalars(-3, -6, -9.5, -13.25)],
              keep_local=1.0, outer_momentum=0.5, momentum_weight=0.5),
    # The second weight is sent at 2, 6, 10 and arrives at 4, 8, 12; the first two steps later.
    keep_case("two fragments, half is kept", PAIR, [[(-4, -3), (-7, -7), (-11, -11)]],
              keep_local=0.5, **HALVED, shown=[(-4, -4), (-8, -8), (-12, -12)]),
    # u = -4, -6 and -2, -5, -6.5: at 6 to -6, at 10 to -13; at 4, 8, 12 to -3, -9.5, -16.75
    keep_case("two fragments, all is kept", PAIR, [[(-4, -5), (-10, -11.5), (-17, -18.75)]],
              keep_local=1.0, outer_momentum=0.5, momentum_weight=0.5, **HALVED),
    keep_case("two fragments of two replicas", [*PAIR, [(3, 3)]],
              [[(-4, -5), (-11, -13), (-19, -21)], [(-12, -7), (-17, -15), (-25, -23)]],
              keep_local=0.5, **HALVED, shown=[(-8, -8), (-16, -16), (-24, -24)]),
    # 1.5 is rounded up: the second weight arrives after one step, the first after two
    keep_case("an uneven round", PAIR, [[(-3, -2.5), (-5, -5.5), (-8, -8.5)]], keep_local=0.5,
              tau=3, fragments=2, shown=[(-3, -3), (-6, -6), (-9, -9)]),
    # arrivals at 7 and 11, and at 5 and 9: each keeps half of three steps
    keep_case("fragments together under way", PAIR, [[(-4, -4), (-6.5, -6.5), (-10.5, -10.5)]],
              keep_local=0.5, **HALVED, delay=3, shown=[(-4, -4), (-8, -8), (-12, -12)]),
    co2_case("one round late", ONE, [scalars(0, -1, -2, -3)], shown=scalars(-1, -1, -2, -3)),
    co2_case("momentum", ONE, [scalars(0, -1, -2.5, -4.25, -6.125)], outer_momentum=0.5,
             shown=scalars(-1, -1, -2, -3.5, -5.25)),
    co2_case("outer rate", ONE, [scalars(0, -0.5, -1.25, -2.125)],
             outer_momentum=0.5, outer_lr=0.5, shown=scalars(-1, -1, -1.5, -2.25)),
    co2_case("constant gap", ONE, [scalars(0, -0.5, -1, -1.5)], gap_penalty=2.0,
             shown=scalars(-1, -1, -1.5, -2)),
    co2_case("two replicas", [scalars(0.5), scalars(1.5)],
             [scalars(0, -2, -5, -8.5, -12.25)] * 2, outer_momentum=0.5,
             shown=scalars(-2, -2, -4, -7, -10.5)),
    co2_case("clip", [scalars(5)], [scalars(0, -5, -10, -15)], outer_momentum=0.5, clip=5.0,
             shown=scalars(-10, -10, -15, -20)),
    co2_case("the clipped momentum is stored", [scalars(5, 0)], [scalars(0, -5, -7.5, -8.75)],
             outer_momentum=0.5, clip=5.0, shown=scalars(-10, 0, -5, -7.5)),
    co2_case("clip by norm", [[(1.5, 2.0)]], [[(0, 0), (-1.5, -2), (-3, -4), (-4.5, -6)]],
             outer_momentum=0.5, clip=2.5, clip_mode="norm",
             shown=[(-3, -4), (-3, -4), (-4.5, -6), (-6, -8)]),
    co2_case("clip by norm leaves short ones", [[(1.5, 2.0)]], [[(0, 0), (-3, -4), (-6, -8)]],
             clip=5.5, clip_mode="norm", shown=[(-3, -4), (-3, -4), (-6, -8)]),
    # C_2 = .1/(1 - .9^2) and Lambda_2 = 1 + 1.9; C_3 = (.09 + .1 * 10/29)/(1 - .9^3)
    co2_case("gap", ONE,
             [scalars(0, -1, -1 - NEXT, -1 - NEXT - 1 / (1 + NEXT * 0.271 / (0.09 + 0.1 * NEXT)))],
             gap_penalty="gap_aware", shown=scalars(-1, -1, -2, -2 - NEXT)),
    # rates 1, 1, 1/2: C_2 = .1 * 2/.19, Lambda_2 = 1 + .95
    co2_case("gap at half the rate", [scalars(0.5, 0.5, 1.0)], [scalars(0, -1, -1 - 1 / 1.95)],
             gap_penalty="gap_aware", lr=[(1.0,), (1.0,), (0.5,)], shown=scalars(-1, -1, -2)),
    # the same rates: C_2 = .1/.19 from displacements alone, Lambda_2 = 1 + 1.9
    co2_case("steady gap at half the rate", [scalars(0.5, 0.5, 1.0)],
             [scalars(0, -1, -1 - 1 / 2.9)], gap_penalty="gap_aware_steady",
             lr=[(1.0,), (1.0,), (0.5,)], shown=scalars(-1, -1, -2)),
    # rates 1, 1/2, 1/2: the first round's rate counts too, though nothing arrives in it
    co2_case("gap after a first round at the full rate", [scalars(0.5, 1.0, 1.0)],
             [scalars(0, -1, -1 - 1 / 1.95)],
             gap_penalty="gap_aware", lr=[(1.0,), (0.5,), (0.5,)], shown=scalars(-1, -1, -2)),
    # rate 0 ends round 2: Lambda_2 = 1 and the average waits, so Lambda_3 = 2.9
    co2_case("gap at rate 0", [scalars(0.5, 0.5, 1.0, 0.5)], [scalars(0, -1, -2, -2 - NEXT)],
             gap_penalty="gap_aware", lr=[(1.0,), (1.0,), (1.0, 0.0), (1.0,)],
             shown=scalars(-1, -1, -2, -3)),
    # disp_2 = sqrt((1 + 9)/2); C_2 = disp_2/1.9
    co2_case("gap of two elements", [[(0.5, 1.5)]],
             [[(0, 0), (-1, -3), (-1 - 1 / 2.9, -3 - 3 / 2.9)]], gap_penalty="gap_aware",
             shown=[(-1, -3), (-1, -3), (-2, -6)]),
    co2_case("gap by element", [[(0.5, 1.5)]],
             [[(0, 0), (-1, -3),
               (-1 - 1 / (1 + 1.9 / sqrt(5)), -3 - 3 / (1 + 3 * 1.9 / sqrt(5)))]],
             gap_penalty="gap_aware_elementwise", shown=[(-1, -3), (-1, -3), (-2, -6)]),
    # alpha scales the movement and so C, not Lambda: 0, 0, -.5, -.5 - .5/2.9
    co2_case("gap at half the outer rate", ONE, [scalars(0, -0.5, -0.5 - 0.5 / 2.9)],
             gap_penalty="gap_aware", outer_lr=0.5, shown=scalars(-1, -1, -1.5)),
    streaming_case(0, 0.0, (-18, -24), (-42, -48), (-66, -72)),
    streaming_case(0, 0.5, (-15, -18), (-31.5, -33), (-47.25, -49.5)),
    streaming_case(0, 1.0, (-12, -12), (-24, -24), (-36, -36)),
    streaming_case(1, 0.0, (-14, -20), (-34, -40), (-54, -60)),
    streaming_case(1, 0.5, (-13, -16), (-28.5, -30), (-42.75, -45)),
    # Fragment 0's first sync would have started at step -1: only its second one finds a mean, that
    # of step 5, where it is at -10 and d = 10; then that of step 11: -24 and d = 4.
    streaming_case(4, 0.0, (-12, -8), (-26, -16), (-34, -24)),
    sparta_case(0, *[scalars(-2, -4, -6, -8, -10, -12)] * 2),
    # At -2 and -6 comes the mean of -1 and -3, which takes 1 away and adds 1.
    sparta_case(1, scalars(-1, -3, -5, -7, -9, -11), scalars(-3, -5, -7, -9, -11, -13)),
    # At -4 and -12 comes the mean of -2 and -6; at -8 and -16 that of -6 and -10.
    sparta_case(2, scalars(-1, -2, -3, -6, -7, -10), scalars(-3, -6, -9, -10, -13, -14)),
    acco_case("constant", [(1, 1)], scalars(0, -1, -1, -2, -2, -3, -3)),
    acco_case("the mean of two halves", [(1, 3)], scalars(0, -1, -2, -3, -4, -5, -6)),
    acco_case("the mean of two replicas", [(1, 0), (3, 8)], scalars(0, -2, -3, -5, -6, -8, -9)),
    acco_case("the rate of the call", [(1, 1)], scalars(0, -0.5, -2, -5, -6),
              lr=scalars(1.0, 0.5, 2.0, 3.0, 4.0)),
    # the buffer is 1, 3/2, 7/4; a step that was not undone would count twice
    acco_case("momentum", [(1, 1)], scalars(0, -1, -1, -2.5, -2.5, -4.25, -4.25), momentum=0.5),
    # g~ = 10, 5, 3.5, 2.5 at x~ = 0, -5, -6.5, -7.5; g = 6, 2, 0.25 at x = 0, -4, -5.75
    acco_case("gradients are taken where the weights are", [(10, 6)],
              scalars(0, -5, -4, -6.5, -5.75, -7.5, -6.6875), slope=1.0, lr=scalars(0.5)),
    # Of (3, 1) the wave (1, 1) has the coefficient √8, and (1, −1) √2. Then that is the largest:
    # what is left of it, √2/2, beside 0.
    demo_case("the rest stays", 0.5, [[(3.0, 1.0), ZEROS]], [(-1, -1), (-2, 0)]),
    # Replica 0 sends 4 of (1, 1)/√2, replica 1 −1 of (1, −1)/√2, and replica 2 as replica 0, but
    # −3: the mean of the first wave is ½. Had all counted, it would be ⅓, as is −1/3 of the second;
    # now −1 outweighs it.
    demo_case("the mean of those who sent it", 0.9,
              [[(4 * ROOT, 4 * ROOT)], [(-ROOT, ROOT)], [(-3 * ROOT, -3 * ROOT)]], [(1, -1)]),
    demo_case("of equal ones the first", 1 - 2**-30, [[(2.0, 0.0), ZEROS]], [(-1, -1), (-2, 0)]),
]  # fmt: skip
SHARDED = [
    replace(case, name=f"{case.name}, sharded", settings={**case.settings, "shard": True})
    for case in CASES
    if case.method == "co2"
]


def values(model: nn.Module) -> Vector:
    return tuple(torch.cat([weight.detach() for weight in model.parameters()]).tolist())


Trained = tuple[list[Vector], list[Vector]]
"""The weights after each round, and what consensus shows there."""


def trained(rank: int, case: Case, comm: CommConfig | None = None) -> Trained:
    """One replica under the method."""
    model, optimizer = case.build()
    with no_gpu_needed(late):
        method = METHODS[case.method](comm=comm, **case.settings)
        method.prepare(model, optimizer, co2.Mesh.world(), schedule=case.rate)
    history, shown = [], []
    for step in range(len(case.expected[0]) * case.tau):
        case.set_lr(optimizer, step)
        case.backward(model, step, rank)
        method.step()
        if (step + 1) % case.tau == 0:
            history.append(values(model))
            with method.consensus():
                shown.append(values(model))
            assert values(model) == history[-1]
    method.flush()
    return history, shown


def on_worlds(cases: list[Case]) -> list[tuple[int, Case]]:
    return [(len(case.gradients), case) for case in cases]


@replicas()
@pytest.mark.parametrize(("world", "case"), on_worlds(CASES + SHARDED), ids=str)
def test_method(rank: int, world: int, case: Case) -> None:
    assert_expected(trained(rank, case), case, rank)


WIRES = [CommConfig(dtype=Precision.bf16), CommConfig(device=CommDevice.cpu)]
HALVES = nonempty(
    case
    for case in CASES
    if case.name
    in ("two replicas", "two keep half their disagreement", "two fragments of two replicas")
)


@replicas()
@pytest.mark.parametrize("comm", WIRES, ids=["bf16", "host"])
@pytest.mark.parametrize(("world", "case"), on_worlds(HALVES), ids=str)
def test_method_over_another_wire(rank: int, world: int, case: Case, comm: CommConfig) -> None:
    """bf16 holds the displacements of these cases; vectors in the host's memory, beside a model
    that is as far as on a GPU, hold any."""
    assert_expected(trained(rank, case, comm), case, rank)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference(case: Case) -> None:
    replicas = []
    for rank in range(len(case.gradients)):
        model, optimizer = case.build()

        def backward(model: nn.Module, step: int, rank: int = rank) -> None:
            case.backward(model, step, rank)

        replicas.append(Replica(model, optimizer, backward, case.set_lr))
    rounds = REFERENCES[case.method](replicas, **case.settings)
    histories: list[list[Vector]] = [[] for _ in replicas]
    shown: list[Vector] = []
    for number in range(1, len(case.expected[0]) + 1):
        while replicas[0].steps_done < number * case.tau:
            found = next(rounds)
        if found is None:
            found = mean(replica.weights() for replica in replicas)
        shown.append(tuple(found.tolist()))
        for replica, history in zip(replicas, histories, strict=True):
            history.append(values(replica.model))
    for rank, history in enumerate(histories):
        assert_expected((history, shown), case, rank)


def assert_expected(found: Trained, case: Case, rank: int) -> None:
    for measured, expected in zip(found, (case.expected[rank], case.consensus()), strict=True):
        one, other = (torch.tensor(table, dtype=torch.float64) for table in (measured, expected))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
