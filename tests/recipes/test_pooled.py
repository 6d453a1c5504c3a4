"""The pooled comparison beside least squares, and beside the paired test, which it is for two."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t, ttest_1samp, ttest_rel

from recipes.tables import pooled
from tests.recipes.test_studies import lines
from tests.recipes.test_tables import TOP1, TOY

RANDOM = np.random.default_rng(0)
NAMES = ("AllReduce", "Local SGD", "CO2_3", "SlowMo")
LOSSES = {
    name: {seed: float(3 + at / 10 + RANDOM.normal(0, 0.05)) for seed in range(5)}
    for at, name in enumerate(NAMES)
}


def test_it_is_least_squares_of_methods_and_seeds() -> None:
    observed = [(m, s, math.log(loss)) for m, own in LOSSES.items() for s, loss in own.items()]
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
    effects = pooled.effects(LOSSES, "AllReduce")
    assert freedom == 12 and list(effects) == list(NAMES[1:])
    for name, mean, error in zip(NAMES[1:], found[1:4], errors[1:4], strict=True):
        assert effects[name].log.mean == pytest.approx(mean)
        assert effects[name].log.half_width == pytest.approx(error * t.ppf(0.975, freedom))
        assert effects[name].p == pytest.approx(2 * t.sf(abs(mean) / error, freedom))


def test_for_two_methods_it_is_the_paired_test_over_the_seeds_of_both() -> None:
    two = {"CO2_3": {**LOSSES["CO2_3"], 9: 1.0}, "AllReduce": {8: 2.0, **LOSSES["AllReduce"]}}
    (effect,) = pooled.effects(two, "AllReduce").values()
    test = ttest_rel(*([math.log(two[name][seed]) for seed in range(5)] for name in two))
    assert effect.p == pytest.approx(test.pvalue)
    interval = test.confidence_interval(0.95)
    assert effect.log.half_width == pytest.approx((interval.high - interval.low) / 2)
    assert pooled.effects(two, "SlowMo") == {} == pooled.effects({}, "AllReduce")
    assert pooled.effects({"AllReduce": {0: 1.0, 1: 2.0}}, "AllReduce") == {}, "alone"
    one_seed = {name: {0: 1.0} for name in NAMES}
    assert pooled.effects(one_seed, "AllReduce") == {}


def test_tasks_are_the_units_of_the_last_column_and_holm_is_for_the_whole_table() -> None:
    names = ("a, loss", "b, loss")
    columns = tuple(replace(TOP1, name=name, part="loss", metric="final.loss") for name in names)
    columns += (replace(TOP1, name="a, score", part="score"),)
    recipe = replace(TOY, columns=columns)
    noise = (0.99, 1.0, 1.01)
    values = {("AllReduce", column.name): (2.0,) * 3 for column in columns}
    for column, above in zip(names, (1.2, 1.5), strict=True):
        values["CO2_3", column] = tuple(2 * above * e for e in noise)
    values["SlowMo", "a, loss"] = tuple(2 * 1.015 * e for e in noise)
    values["CO2_3", "a, score"] = (9.0, 9.0, 9.0)
    (table,) = pooled.tables(recipe, lines(values))
    assert table.head == ["method", "a", "b", "all tasks"]
    cells = {str(row[0]): [str(cell) for cell in row[1:]] for row in table.rows}
    assert list(cells) == ["CO2_3", "SlowMo"]
    assert cells["CO2_3"][0].startswith("+20.0 % [") and cells["CO2_3"][0].endswith("] *")
    logs = [math.log(above) + sum(map(math.log, noise)) / 3 for above in (1.2, 1.5)]
    interval = ttest_1samp(logs, 0).confidence_interval(0.95)
    low, high = (100 * math.expm1(end) for end in (interval.low, interval.high))
    assert cells["CO2_3"][2] == f"+34.2 % [{low:.1f}, {high:.1f}]"
    assert cells["SlowMo"][1:] == ["—", "—"], "one task has no mean over tasks"
    own = {row: dict(enumerate(values[row, "a, loss"])) for row in ("AllReduce", "CO2_3", "SlowMo")}
    alone = pooled.effects(own, "AllReduce")["SlowMo"].p
    assert 0.05 / 2 < alone < 0.05, "significant alone, but there is a larger p in the table"
    assert not cells["SlowMo"][0].endswith("*")
    assert list(pooled.tables(recipe, [])) == []
