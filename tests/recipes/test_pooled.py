"""The spread that all methods share beside least squares, and where they share none."""

import math

import numpy as np
import pytest
from scipy.stats import t, ttest_rel

from recipes.tables import entries, pooled
from recipes.tables.entries import Difference, Entry
from tests.recipes.test_studies import lines
from tests.recipes.test_tables import TOP1, TOY

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
    found = entries.entries(recipe, lines({(row, LOSS): v for row, v in values.items()}), "smoke")
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


def test_a_small_spread_by_chance_is_no_certainty() -> None:
    """As on ViT: a paired test gave +10.8 % a star and +120.9 % none."""
    vit = {
        "AllReduce": (0.1793, 0.2142, 0.1999),
        "Local SGD": (0.2016, 0.2354, 0.2203),
        "SlowMo": (0.1954, 0.1877, 0.2017),
        "CO2_3": (0.5076, 0.3954, 0.4079),
    }
    own = differences(vit)
    assert own["CO2_3"].significant and not own["Local SGD"].significant
    paired = ttest_rel(np.log(vit["Local SGD"]), np.log(vit["AllReduce"]))
    assert paired.pvalue < 0.01 and own["Local SGD"].pooled


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
