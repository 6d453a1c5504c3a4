"""How many times AllReduce's steps a method needs, and where that leads."""

import math

import pytest

from recipes.tables import equal_steps
from recipes.tables.log_mean import LogMean, percent, percent_more

CURVE = {25: 3.7987, 100: 3.0683, 300: 2.6689, 1000: 2.4820}


def test_a_loss_lies_between_two_budgets() -> None:
    found = equal_steps.log_rounds_to(2.6193, CURVE)
    assert found is not None and not found[1]
    assert math.exp(found[0]) == pytest.approx(413, abs=0.5)
    (x,) = equal_steps.ratio({0: {1000: 2.6193}}, {0: CURVE}, 1000).logs.values()  # type: ignore[union-attr]
    assert math.exp(x) == pytest.approx(2.42, abs=0.005)
    for rounds, loss in CURVE.items():
        assert equal_steps.log_rounds_to(loss, CURVE) == (pytest.approx(math.log(rounds)), False)


def test_beyond_the_curve_the_nearest_line_goes_on() -> None:
    curve = {10: 5.0, 100: 4.0, 1000: 3.5}
    assert equal_steps.log_rounds_to(6.0, curve) == (pytest.approx(0.0), True)
    assert equal_steps.log_rounds_to(3.0, curve) == (pytest.approx(math.log(10_000)), True)
    shuffled = dict(reversed(curve.items()))
    assert equal_steps.log_rounds_to(4.5, shuffled) == (pytest.approx(math.log(10**1.5)), False)
    assert equal_steps.log_rounds_to(4.0, {10: 4.0}) is None, "no line"
    assert equal_steps.log_rounds_to(4.0, {10: 5.0, 100: 4.0, 1000: 4.0}) is None, (
        "it does not fall"
    )


def test_every_seed_has_its_own_curve() -> None:
    """Of x = 2 and 8 the geometric mean is 4; seeds that AllReduce has not do not count."""
    base = {0: {100: 4.0, 200: 3.0}, 1: {100: 3.0, 200: 2.0}, 2: {}}
    own = {0: {200: 4.0}, 1: {200: 5.0, 50: 1.0}, 2: {200: 1.0}, 3: {200: 4.0}}
    found = equal_steps.ratio(own, base, 200)
    assert found is not None and found.extrapolated, "seed 1's loss is above 3"
    assert math.exp(found.mean.mean) == pytest.approx(4)
    # Logarithms a factor of 2 to either side: with one degree of freedom 12.706 errors, and the
    # error is that factor's logarithm.
    assert found.mean.half_width == pytest.approx(12.7062 * math.log(2), rel=1e-4)
    alone = equal_steps.ratio({0: own[0]}, base, 200)
    assert alone is not None and not alone.extrapolated and alone.mean.text(".2f") == "2.00"
    assert equal_steps.ratio(own, base, 1000) is None


def test_a_constant_factor_in_steps_is_a_constant_percentage() -> None:
    """AllReduce by a power law of its last two points; what came before does not count."""
    law = {rounds: 5 * rounds**-0.1 for rounds in (500, 1000)}
    base = {0: {250: 9.0, **law}, 1: {250: 8.0, **law}}
    own = {seed: {500: 9.0, 1000: law[500]} for seed in base}
    found = equal_steps.at_steady_ratio(own, base)
    assert found is not None and found.shown(found.mean) == pytest.approx(100 * (2**0.1 - 1))
    assert found.half_width == pytest.approx(0, abs=1e-12)
    for rounds in (10_000, 50_000):
        later, here = (5 * at**-0.1 for at in (rounds / 2, rounds))
        assert found.shown(found.mean) == pytest.approx(100 * (later / here - 1))
    assert equal_steps.at_steady_ratio({}, base) is None


def test_a_gap_goes_on_as_between_its_last_two_points() -> None:
    base = {seed: {10: 4.0, 100: 3.0, 400: 2.0} for seed in (0, 1)}
    gaps = {10: 0.7, 100: 0.1, 400: 0.05}  # b = 1/2 at last
    own = {0: {rounds: base[0][rounds] * (1 + gap) for rounds, gap in gaps.items()}}
    found = equal_steps.at_steady_exponent(own, base, 10_000)
    assert found is not None and found.shown(found.mean) == pytest.approx(1)
    assert found.half_width is None
    ((b, last, gap),) = equal_steps.gap_exponents(own, base).values()
    assert (b, last, gap) == (pytest.approx(0.5), 400, pytest.approx(0.05))
    below = {**own, 1: {100: 3.3, 400: 1.9}}
    assert equal_steps.at_steady_exponent(below, base, 10_000) is None, "no logarithm"
    assert equal_steps.gap_exponents({0: {400: 2.5}}, base) == {}, "one point"


def test_intervals_of_logarithms() -> None:
    one = LogMean.of([math.log(1.1), math.log(1.1)], percent_more)
    assert one.text("+z.1f", unit=" %") == "+10.0 % [10.0, 10.0]"
    wide = LogMean(math.log(0.2), math.log(2), percent)
    assert wide.text(".0f", mark="†") == "20† [10, 40]"
    assert one.overlaps(wide) and wide.overlaps(one)
    assert not one.overlaps(LogMean(math.log(0.2), 0.1, percent))
    assert not one.overlaps(LogMean(math.log(1.1), None, percent_more)), "it has no interval"
