"""The studies behind "does CO2 match AllReduce?": fits, choices, tables and figures from invented
values."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from recipes.paper import table4, tau_sweep
from recipes.recipe import Recipe, Row, Rows
from recipes.runs import measured
from recipes.runs.cells import TrainCell, own_words
from recipes.runs.collect import collect
from recipes.studies import gap, rates, rounds
from recipes.tables.power_law import RESAMPLES, PowerLaw, interval, resampled
from recipes.tuning.tuning import TUNING_SEED, TunedRecipe
from tests.recipes.test_experiments import line, place, write_ours, write_summary

__all__ = ["place"]  # a fixture

STUDIES = {
    recipe.name: recipe for recipe in (rounds.RECIPE, gap.RECIPE, tau_sweep.RECIPE, table4.RECIPE)
}
BEGIN = {
    "rounds": ("AllReduce",),
    "gap": ("none, β 0.4, α 1", "gap_aware_steady, β 0, α 1"),
    "tau_sweep": ("AllReduce", "CO2, τ = 24"),
    "table4": (),
}
"""Of some of their trials' names."""


def lines(values: Mapping[tuple[str, str], tuple[float, ...]]) -> Rows:
    """Rows of ours.csv by names of row and column, with a value for each seed."""
    return [
        {"row": row, "column": column, "seed": str(seed), "value": str(value)}
        for (row, column), own in values.items()
        for seed, value in enumerate(own)
    ]


def write_trials(trials: Recipe, losses: Mapping[str, float], begin: tuple[str, ...] = ()) -> None:
    """A value for every trial whose name begins so, or for all; 9 where none is given."""
    write_ours(
        [
            line(trials, row.name, column.name, TUNING_SEED, losses.get(row.name, 9.0))
            for row, column in trials.places("smoke")
            if row.name.startswith(begin or "")
        ]
    )


def words(recipe: TunedRecipe, row: str, column: str, scale: str = "smoke") -> tuple[str, ...]:
    """The overrides of a run."""
    cell = recipe.cell(recipe.row(row), recipe.column(column), scale, 0)
    assert isinstance(cell, TrainCell)
    return cell.overrides


def test_a_row_multiplies_what_its_column_gives() -> None:
    column = ("task=gpt2", "optim.lr=2.5e-3", "train.steps=960")
    assert own_words((*column, "method=co2", "optim.lr=×2", "train.steps=×1.5")) == (
        *("task=gpt2", "optim.lr=0.005", "train.steps=1440", "method=co2"),
    )
    assert own_words((*column, "train.steps=×1")) == (
        "task=gpt2",
        "optim.lr=2.5e-3",
        "train.steps=960",
    )
    with pytest.raises(KeyError):
        own_words(("optim.lr=×2",))


def test_a_power_law_is_found_again() -> None:
    law = PowerLaw.through({rounds: 40 * rounds**-0.5 for rounds in (25, 100, 1000)})
    assert law is not None and (law.a, law.b) == pytest.approx((40, 0.5))
    assert law.gap(400) == pytest.approx(2) and law.rounds(1) == pytest.approx(1600)
    assert PowerLaw(4, -0.1).rounds(1) == math.inf, "it grows"
    assert PowerLaw(4, 1e-4).rounds(1) == math.inf, "beyond any number"
    assert PowerLaw.through({25: 3.0, 100: -0.1}) is None, "no logarithm"
    assert PowerLaw.through({25: 3.0}) is None


def test_the_bootstrap_is_fixed_and_as_wide_as_the_seeds_differ() -> None:
    gaps = {25: [8.0, 9.0, 10.0], 100: [4.0, 5.0, 4.5], 300: [2.0, 3.0, 2.5]}
    laws = resampled(gaps)
    assert len(laws) == RESAMPLES and resampled(gaps) == laws
    low, high = interval([law.b for law in laws])
    own = PowerLaw.through({25: 9.0, 100: 4.5, 300: 2.5})
    assert own is not None and low < own.b < high and high - low > 0.05
    equal = resampled({25: [8.0, 8.0], 100: [4.0, 4.0]})
    assert interval([law.b for law in equal]) == pytest.approx((0.5, 0.5))
    assert 0 < len(resampled({25: [1.0, 2.0], 100: [-1.0, 2.0]})) < RESAMPLES, "some have none"
    assert interval([3.0, math.inf, 1.0]) == (1.0, math.inf)


def test_gaps_by_rounds(tmp_path: Path) -> None:
    """AllReduce at 4 or 3; the others above it by a power law, none at all, and less than that."""
    allreduce = {25: 4.0, 100: 4.0, 300: 3.0, 1000: 3.0}
    values = {(rounds.ALLREDUCE, rounds.name(r)): (loss,) * 3 for r, loss in allreduce.items()}
    for r, loss in allreduce.items():
        share = 0.5 * r**-0.5
        own = tuple(loss * (1 + share * noise) for noise in (0.9, 1.0, 1.1))
        values["CO2", rounds.name(r)] = own
        values["Local SGD", rounds.name(r)] = (loss * 0.99,) * 3
    gaps, fit = rounds.tables(lines(values), [])
    of_co2 = next(row for row in gaps.rows if row[0] == "CO2")
    assert of_co2[1] == "+10.00 [7.52, 12.48]", "1 / 3^.5 times 4.3027 on either side"
    found = {row[0]: row[1:] for row in fit.rows}
    assert set(found) == {"CO2", "Local SGD"}
    assert found["Local SGD"] == ("—",) * 4, "it is below AllReduce"
    a, b, share_of_draws, to_goal = map(str, found["CO2"])
    assert a == "50" and b.startswith("0.50 [0.4") and share_of_draws == "100%"
    assert to_goal.startswith("2,500 [") and to_goal.endswith("], extrapolated")
    assert "extrapolated" not in rounds.fit_words({25: [4.0], 1000: [0.5]})[3], "it lies between"
    (path,) = rounds.draw(lines(values), tmp_path / "rounds")
    assert "Local SGD" in path.read_text() and path.name == "rounds_gaps.svg"
    assert list(rounds.tables([], [])) == list(rounds.draw([], tmp_path / "none")) == []


def test_the_longest_training_has_the_rate_of_one_that_was_tuned(place: Path) -> None:
    write_trials(rounds.RECIPE.trials, {"CO2, rate 8e-3": 3.0}, ("CO2, rate", "DiLoCo"))
    assert rounds.RECIPE.undecided("smoke") == 3 * len(rounds.ROUNDS), "two methods are tuned"
    cells = [cell for *_, cell in rounds.RECIPE.trials.cells("smoke")]
    assert len(cells) == len(rounds.ROWS) * 4 * 3 + 3, "four rates, DiLoCo five"
    for r in rounds.ROUNDS:
        own = words(rounds.RECIPE, "CO2", rounds.name(r))
        assert f"train.steps={12 * r}" in own and "optim.lr=8e-3" in own
        assert f"optim.warmup_steps={12 * r // 25}" in own, "4 %"
    assert "optim.lr=1e-3" in words(rounds.RECIPE, "DiLoCo", "1,000 rounds"), "the first of equals"
    with pytest.raises(LookupError, match="trials of rounds_trials are missing"):
        words(rounds.RECIPE, "AllReduce", "25 rounds")

    trials = rounds.RECIPE.trials
    last = trials.cell(trials.row("DiLoCo, rate 1.6e-2"), trials.columns[0], "smoke", TUNING_SEED)
    write_summary(last, 1.0)
    assert "optim.lr=1.6e-2" in words(rounds.RECIPE, "DiLoCo", "25 rounds"), "a run here first"


def test_tuned_values_survive_a_clone(place: Path) -> None:
    recipe = rounds.RECIPE
    write_trials(recipe.trials, {}, ("CO2, rate",))
    trials = measured.read(Path("results/ours.csv"))
    values = [line(recipe, "CO2", "25 rounds", seed, 3.0 + seed) for seed in (0, 1)]
    write_ours([*trials, *values])
    assert collect([recipe], place / "results", "smoke") == (0, 2)
    assert len(measured.read(Path("results/ours.csv"))) == len(trials) + 2, (
        "although no run is here"
    )


def test_settings_lie_where_the_rule_has_them(tmp_path: Path) -> None:
    """A computed Λ counts as it was at the end."""
    stable, faded = gap.Setting("2", "0.2", "1"), gap.Setting("gap_aware", "0.2", "1")
    values = {
        (gap.ALLREDUCE.name, gap.LOSS.name): (3.0, 3.1),
        (stable.row.name, gap.LOSS.name): (3.06, 3.162),
        (stable.row.name, gap.GAP.name): (2.0, 2.0),
        (faded.row.name, gap.LOSS.name): (3.3, 3.41),
        (faded.row.name, gap.GAP.name): (1.2, 1.3),
    }
    (table,) = gap.tables(lines(values), [])
    assert table.rows == [
        (stable.row.name, "0.700", "yes", "3.1110", "+2.00"),
        (faded.row.name, "1.000", "no", "3.3550", "+10.00"),
    ]
    (path,) = gap.draw(lines(values), tmp_path / "gap")
    text = path.read_text()
    assert "gap_aware" in text and "β + α/Λ" in text and "elementwise" not in text, (
        "it has no value"
    )
    assert list(gap.tables([], [])) == list(gap.draw([], tmp_path / "none")) == []
    assert gap.GAP.value({"gap": 1.25}) == 1.25, "as summary.json has it"
    assert len(gap.SETTINGS) == len(gap.GAPS) * len(gap.OUTER_STEPS)


def test_the_best_rate_is_at_the_bottom_of_a_parabola() -> None:
    tried = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
    found = {rate: 3 + math.log(rate / 5e-3) ** 2 for rate in tried}
    assert rates.optimum(found) == pytest.approx(5e-3)
    bent = {**found, 1e-3: 99.0, 1.6e-2: 99.0}
    assert rates.optimum(bent) == pytest.approx(5e-3), "of the best and its neighbours alone"
    assert rates.optimum({rate: rate for rate in tried}) is None, "at the border"
    assert rates.optimum({}) is None


def test_the_best_rates_beside_the_root_of_the_replicas(tmp_path: Path) -> None:
    def at(method: Row, best: float) -> dict[tuple[str, str], tuple[float, ...]]:
        return {
            (f"{method.name}, rate {rate}", rates.name(4)): (3 + math.log(float(rate) / best) ** 2,)
            for rate in rates.RATES
        }

    first, second, third, _ = rates.METHODS
    ours = lines({**at(first, 3e-3), **at(second, 6e-3), **at(third, 1e-1)})
    (table,) = rates.optima(ours, [])
    assert table.rows == [
        ("4", first.name, "0.003", "1.00", "2.00"),
        ("4", second.name, "0.006", "2.00", "2.00"),
        ("4", third.name, "0.032, at the border", "—", "2.00"),
    ]
    (path,) = rates.draw(ours, tmp_path / "rates")
    assert path.name == "rates_4_replicas.svg"
    assert list(rates.optima([], [])) == list(rates.draw([], tmp_path / "none")) == []


def test_every_number_of_replicas_has_the_same_total_batch() -> None:
    for replicas in rates.REPLICAS:
        settings = rates.column(replicas).overrides
        assert f"train.batch_size={16 // replicas}" in settings
        assert f"launch.workers={replicas}" in settings


def test_a_tau_has_the_rate_of_the_nearest_that_was_tuned(place: Path) -> None:
    assert [tau_sweep.nearest(tau) for tau in tau_sweep.TAUS] == [3, 3, 3, 24, 24, 24, 96, 96]
    lowest = {"CO2, τ = 24, rate 8e-3": 3.0, "CO2, τ = 96, rate 4e-3": 3.0}
    write_trials(tau_sweep.RECIPE.trials, lowest, ("CO2",))
    found = words(tau_sweep.RECIPE, "CO2, τ = 12", "overlap, %")
    assert "co2.tau=12" in found and "optim.lr=8e-3" in found and "co2.tau=24" not in found
    assert "optim.lr=4e-3" in words(tau_sweep.RECIPE, "CO2, τ = 192", "overlap, %")
    assert tau_sweep.RECIPE.undecided("smoke") == 2 * 9, "AllReduce and local SGD are not tuned"


def test_the_tau_sweep_is_drawn(tmp_path: Path) -> None:
    values = {
        ("AllReduce", "validation loss"): (5.0,),
        **{(tau_sweep.name("CO2", tau), "validation loss"): (8.0, 9.0) for tau in (3, 12)},
        (tau_sweep.name("Local SGD", 3), "validation loss"): (7.0,),
    }
    (path,) = tau_sweep.draw(lines(values), tmp_path / "tau")
    assert path.name == "tau_validation_loss.svg" and "Local SGD" in path.read_text()


def test_an_ablation_has_one_rate_and_at_the_paper_s_scale_conf_s(place: Path) -> None:
    write_trials(table4.RECIPE.trials, {"CO2, rate 8e-3": 3.0})
    for row in table4.ROWS:
        assert "optim.lr=8e-3" in words(table4.RECIPE, row.name, "GPT-2")
    at_paper = words(table4.RECIPE, "CO2 without gap penalty", "GPT-2", "paper")
    assert "co2.gap_penalty=none" in at_paper
    assert not any(word.startswith("optim.lr=") for word in at_paper)
    assert table4.RECIPE.undecided("paper") == 0


@pytest.mark.parametrize("recipe", STUDIES.values(), ids=STUDIES)
def test_what_won_composes(recipe: TunedRecipe, place: Path) -> None:
    """test_tables.py composes their trials."""
    write_trials(recipe.trials, {}, BEGIN[recipe.name])
    made = {row.overrides: cell for row, _, _, cell in recipe.cells("smoke", (0,))}
    assert made
    for cell in made.values():
        assert isinstance(cell, TrainCell)
        assert cell.config().data.validation.value == "report", "not what was tuned on"
    for *_, cell in recipe.trials.cells("smoke"):
        assert "data.validation=tuning" in cell.command and f"seed={TUNING_SEED}" in cell.command
