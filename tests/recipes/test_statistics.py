"""How many times AllReduce's steps a method needs, and the spread that all methods share beside
least squares."""

import math

import numpy as np
import pytest
from scipy.stats import t, ttest_rel

from recipes.tables import entries, equal_steps, pooled
from recipes.tables.entries import Difference, Entry
from tests.recipes.test_tables import TOP1, TOY

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


RANDOM = np.random.default_rng(0)
NAMES = ("AllReduce", "Local SGD", "CO2_3", "SlowMo")
NOISE = {name: RANDOM.normal(0, 0.02, 5) for name in NAMES}
LOSSES = {
    name: tuple(math.exp(1 + at / 10 + seed / 20 + e) for seed, e in enumerate(NOISE[name]))
    for at, name in enumerate(NAMES)
}
LOSS = "loss"


def differences(values: dict[str, tuple[float, ...]]) -> dict[str, Difference]:
    """To AllReduce, by row."""
    column = type(TOP1)(LOSS, ("task=toy",), "final.loss", lower=True)
    recipe = type(TOY)("golden", "Golden", "", TOY.rows, (column,))
    lines = [
        {"row": row, "column": LOSS, "seed": str(seed), "value": str(value)}
        for row, own in values.items()
        for seed, value in enumerate(own)
    ]
    found = entries.entries(recipe, lines, "smoke")
    return {e.row.name: e.to_first for e in found if e.to_first is not None}


def test_it_is_least_squares_of_methods_and_seeds() -> None:
    observed = [(m, s, math.log(v)) for m, own in LOSSES.items() for s, v in enumerate(own)]
    design = np.array(
        [
            [1.0, *(m == name for name in NAMES[1:]), *(s == seed for seed in range(1, 5))]
            for m, s, _ in observed
        ]
    )
    logs = np.array([log for *_, log in observed])
    found, squares, rank, _ = np.linalg.lstsq(design, logs)
    freedom = len(logs) - int(rank)
    errors = np.sqrt(np.diag(np.linalg.inv(design.T @ design)) * squares[0] / freedom)
    own = differences(LOSSES)
    assert freedom == 12 and list(own) == list(NAMES[1:])
    for name, mean, error in zip(NAMES[1:], found[1:4], errors[1:4], strict=True):
        half = error * t.ppf(0.975, freedom)
        assert own[name].mean == pytest.approx(100 * math.expm1(mean)) and own[name].pooled
        ends = (100 * math.expm1(mean - half), 100 * math.expm1(mean + half))
        assert own[name].ends == pytest.approx(ends)
        assert own[name].p == pytest.approx(2 * t.sf(abs(mean) / error, freedom))


def test_methods_that_scatter_unequally_have_paired_tests() -> None:
    wild = tuple(math.exp(1.3 + e) for e in (0.0, 0.5, -0.4, 0.3, -0.6))
    own = differences({**LOSSES, "SlowMo": wild})
    test = ttest_rel(np.log(LOSSES["CO2_3"]), np.log(LOSSES["AllReduce"]))
    assert not own["CO2_3"].pooled and own["CO2_3"].p == pytest.approx(test.pvalue)


def test_seeds_that_are_missing_and_counted_figures_are_not_pooled() -> None:
    few = {**LOSSES, "SlowMo": LOSSES["SlowMo"][:3]}
    own = differences(few)
    assert own["CO2_3"].pooled and not own["SlowMo"].pooled
    same = {name: dict(enumerate((1.0, 2.0, 3.0))) for name in NAMES}
    assert pooled.shared(same) is None
    assert pooled.shared({"AllReduce": {0: 1.0, 1: 2.0}}) is None, "alone"
    assert pooled.shared({name: {0: 1.0} for name in NAMES}) is None, "one seed"
    never = Entry(TOY.rows[0], TOP1, {0: 1.0, 1: math.inf})
    assert entries.compared(never.values, {0: 1.0, 1: 2.0}) is None
