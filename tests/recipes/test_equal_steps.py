"""How many times AllReduce's steps a method needs, and where that leads."""

import math

import pytest

from recipes.tables import equal_steps
from recipes.tables.log_mean import LogMean, percent, percent_more

FEW, MANY = (25, 100, 300, 1000), (25, 50, 100, 200, 300, 400, 600, 800, 1000, 2000, 3000)


def law(rounds: float) -> float:
    """A power law with a floor, much like GPT-2's losses under AllReduce."""
    return 2.1 + 6.5 * rounds**-0.42


@pytest.mark.parametrize(("budgets", "error"), [(FEW, 0.04), (MANY, 0.01)])
@pytest.mark.parametrize("rounds", [100, 300, 1000])
@pytest.mark.parametrize("factor", [1.2, 1.5, 2.0])
def test_the_factor_of_a_power_law_comes_out(
    budgets: tuple[int, ...], error: float, rounds: int, factor: float
) -> None:
    """And lies in the interval that the fit alone gives; a chord is as far off as 15 %."""
    base = {seed: {r: law(r) for r in budgets} for seed in (0, 1)}
    own = {seed: {rounds: law(rounds / factor)} for seed in base}
    found = equal_steps.ratio(own, base, rounds)
    assert found is not None and not found.extrapolated
    assert math.exp(found.mean.mean) == pytest.approx(factor, rel=error)
    assert found.mean.ends is not None and found.mean.ends[0] <= factor <= found.mean.ends[1]


def test_a_point_more_moves_the_factor_within_its_interval() -> None:
    """As AllReduce's training of 800 rounds did: it ends 0.024 below the chord."""
    four = {25: 3.7965, 100: 3.0865, 300: 2.6673, 1000: 2.4878}
    own = {seed: {1000: 2.5176} for seed in (0, 1)}
    before, after = (
        equal_steps.ratio(own, {0: curve, 1: curve}, 1000)
        for curve in (four, {**four, 800: 2.4973})
    )
    assert before is not None and after is not None and before.mean.ends is not None
    assert before.mean.ends[0] <= math.exp(after.mean.mean) <= before.mean.ends[1]
    assert after.fit_error < before.fit_error
    line = 300 * (10 / 3) ** ((four[300] - 2.5176) / (four[300] - four[1000]))
    assert 1000 / line < 0.95 * math.exp(before.mean.mean), "a chord makes every factor too small"


def test_beyond_the_curve_the_nearest_line_goes_on() -> None:
    curve = equal_steps.falling({1000: 3.5, 100: 4.0, 10: 5.0})
    assert equal_steps.log_rounds_to(6.0, curve) == (pytest.approx(0.0), True)
    assert equal_steps.log_rounds_to(3.0, curve) == (pytest.approx(math.log(10_000)), True)
    for rounds, loss in ((10, 5.0), (100, 4.0), (1000, 3.5)):
        assert equal_steps.log_rounds_to(loss, curve) == (pytest.approx(math.log(rounds)), False)
    assert equal_steps.log_rounds_to(4.0, curve[:1]) is None, "no line"


def test_where_the_loss_rises_by_chance_neighbours_are_one_point() -> None:
    level = equal_steps.falling({10: 5.0, 100: 4.0, 400: 4.2, 900: 4.0, 2000: 3.0})
    assert level[1] == (pytest.approx(math.log(200)), pytest.approx(4.1)) and len(level) == 4
    assert len(equal_steps.falling({10: 1.0, 20: 2.0, 30: 3.0})) == 1, "no curve"


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
