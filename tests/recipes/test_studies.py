"""The studies behind "does CO2 match AllReduce?": fits, choices, tables and figures from invented
values."""

import math
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest

from recipes.paper import table4, tau_sweep
from recipes.recipe import Recipe, Row, Rows
from recipes.runs import measured
from recipes.runs.cells import TrainCell, is_of, own_words
from recipes.runs.collect import collect
from recipes.studies import gap, rates, rounds
from recipes.tables.methods import PAPERS_GAP, STEADY_GAP
from recipes.tuning.tuning import OURS, TUNING_SEED, TunedRecipe
from tests.recipes.test_experiments import line, place, write_ours, write_summary

__all__ = ["place"]  # a fixture

CO2 = STEADY_GAP.name
STUDIES = {
    recipe.name: recipe for recipe in (rounds.RECIPE, gap.RECIPE, tau_sweep.RECIPE, table4.RECIPE)
}
BEGIN = {
    "rounds": ("AllReduce",),
    "gap": ("none, β 0.4, α 1", "gap_aware_steady, β 0, α 1"),
    "tau_sweep": ("AllReduce", f"{CO2}, τ = 24"),
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


def test_gaps_by_rounds(tmp_path: Path) -> None:
    """AllReduce's own losses are others' after more rounds; methods, seeds and budgets are missing.

    CO2 after 100, 300 and 1,000 rounds is where AllReduce is after 25, 100 and 300, but for a seed
    of its own that AllReduce has not; Local SGD is better after 300 rounds than AllReduce ever.
    """
    allreduce = {25: 4.0, 100: 3.5, 300: 3.0, 1000: 2.5}
    values = {(rounds.ALLREDUCE, rounds.name(r)): (loss,) * 3 for r, loss in allreduce.items()}
    values[CO2, rounds.name(100)] = (4.0, 4.0, 4.0, 9.0)
    values[CO2, rounds.name(300)] = (3.5, 3.5, 3.5)
    values[CO2, rounds.name(1000)] = (2.95, 3.0, 3.05)
    values["Local SGD", rounds.name(300)] = (2.4,)
    steps, ahead = rounds.tables(lines(values), [])
    found = {row[0]: row[1:] for row in steps.rows}
    assert set(found) == {CO2, "Local SGD"}
    assert found[CO2][0] == "—"
    for cell, x in zip(found[CO2][1:], ("4.00", "3.00", "3.3"), strict=True):
        assert str(cell).startswith(x) and "†" not in str(cell)
    assert "has 4 points (25, 100, 300, 1,000 rounds)" in steps.text
    few = {place: own for place, own in values.items() if place != (rounds.ALLREDUCE, "25 rounds")}
    more = lines(few | {(rounds.ALLREDUCE, rounds.name(800)): (2.6,)})
    assert "4 points, fewer of some seeds (100, 300, 800" in next(rounds.tables(more, [])).text
    # From 300 to 1,000 rounds 0.5; 0.1 further, a fifth of the way: 1,000 · (10 / 3)^0.2.
    assert found["Local SGD"] == ("—", "—", f"{0.3 * (3 / 10) ** 0.2:.2f}†", "—")
    of_both = {row[0]: [str(cell) for cell in row[1:]] for row in ahead.rows}
    assert "Local SGD" not in of_both, "it has no training of the longest kind"
    # 3.32^b with b = ln(3 / 2.5) / ln(10 / 3): x is 10 / 3 where its loss is 3 to begin with.
    assert of_both[CO2][0].startswith("19.9") and of_both[CO2][1].startswith("-0.1")
    assert "b is 0.10, 0.14, 0.15;" in ahead.text
    drawn = list(rounds.draw(lines(values), tmp_path / "rounds"))
    assert [path.name for path in drawn] == ["rounds_gaps.svg", "rounds_steps.svg"]
    assert all("Local SGD" in path.read_text() for path in drawn)
    assert list(rounds.tables([], [])) == list(rounds.draw([], tmp_path / "none")) == []


def test_the_longest_training_has_the_rate_of_one_that_was_tuned(place: Path) -> None:
    write_trials(rounds.RECIPE.trials, {f"{CO2}, rate 8e-3": 3.0}, (f"{CO2}, rate", "DiLoCo"))
    tuned = {rounds.DILOCO, rounds.CO2}
    bases = {row: row for row in rounds.ROWS} | rounds.VARIANTS | rounds.ALONE
    places = rounds.RECIPE.places("smoke")
    left = sum(bases[row] not in tuned for row, _ in places)
    assert rounds.RECIPE.undecided("smoke") == left, "variants need no trials"
    assert [rounds.tuned_rounds(r) for r in rounds.CURVE] == [25, 25, 100, 300, *[300] * 7]
    cells = [cell for *_, cell in rounds.RECIPE.trials.cells("smoke")]
    rivals = len(rounds.RIVALS) * 3
    assert len(cells) == len(rounds.BASES) * 4 * 3 + 3 + rivals, "four rates, DiLoCo five"
    for r in rounds.ROUNDS:
        own = words(rounds.RECIPE, CO2, rounds.name(r))
        assert f"train.steps={12 * r}" in own and "optim.lr=8e-3" in own
        assert f"optim.warmup_steps={12 * r // 25}" in own, "4 %"
    assert "optim.lr=1e-3" in words(rounds.RECIPE, "DiLoCo", "1,000 rounds"), "the first of equals"
    with pytest.raises(LookupError, match="trials of rounds_trials are missing"):
        words(rounds.RECIPE, "AllReduce", "25 rounds")

    trials = rounds.RECIPE.trials
    last = trials.cell(trials.row("DiLoCo, rate 1.6e-2"), trials.columns[0], "smoke", TUNING_SEED)
    write_summary(last, 1.0)
    assert "optim.lr=1.6e-2" in words(rounds.RECIPE, "DiLoCo", "25 rounds"), "a run here first"


def test_the_paper_s_gap_stands_beside_ours_and_allreduce_has_more_points() -> None:
    """What was measured before conf's gap changed still counts; only AllReduce has all points."""
    known = {(r["row"], r["column"], r["seed"]): r for r in measured.read(OURS)}
    for many, seed in product(rounds.ROUNDS, range(3)):
        cell = rounds.RECIPE.cell(PAPERS_GAP, rounds.column(many), "smoke", seed)
        assert is_of(known[PAPERS_GAP.name, rounds.name(many), str(seed)], cell)
    for more in set(rounds.CURVE) - set(rounds.ROUNDS):
        takes = [row.name for row in rounds.ROWS if rounds.column(more).takes(row, "smoke")]
        assert takes == [rounds.ALLREDUCE]


def test_tuned_values_survive_a_clone(place: Path) -> None:
    recipe = rounds.RECIPE
    write_trials(recipe.trials, {}, (f"{CO2}, rate",))
    trials = measured.read(Path("results/ours.csv"))
    values = [line(recipe, CO2, "25 rounds", seed, 3.0 + seed) for seed in (0, 1)]
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
    lowest = {f"{CO2}, τ = 24, rate 8e-3": 3.0, f"{CO2}, τ = 96, rate 4e-3": 3.0}
    write_trials(tau_sweep.RECIPE.trials, lowest, (CO2,))
    found = words(tau_sweep.RECIPE, f"{CO2}, τ = 12", "overlap, %")
    assert "co2.tau=12" in found and "optim.lr=8e-3" in found and "co2.tau=24" not in found
    assert "optim.lr=4e-3" in words(tau_sweep.RECIPE, f"{CO2}, τ = 192", "overlap, %")
    assert tau_sweep.RECIPE.undecided("smoke") == 2 * 17, "one row of CO2 alone is tuned"


def test_the_tau_sweep_is_drawn(tmp_path: Path) -> None:
    values = {
        ("AllReduce", "validation loss"): (5.0,),
        **{(tau_sweep.name(CO2, tau), "validation loss"): (8.0, 9.0) for tau in (3, 12)},
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
