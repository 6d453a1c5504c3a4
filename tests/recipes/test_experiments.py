"""Experiments with trials, functions in place of runs, or tables of their own; the studies behind
"does CO2 match AllReduce?"; and cells, which are trained as by train.py."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
import yaml

from co2.config import Optimizer, Validation
from co2.errors import DIVERGED, ConfigError
from co2.record.folder import run_folder
from recipes.faults import goodput
from recipes.paper import scaling, table3, table4, tau_sweep
from recipes.recipe import Recipe, Row
from recipes.runs import cells, functions, measured
from recipes.runs.cells import TrainCell, composed_config, own_words, run
from recipes.runs.collect import collect
from recipes.runs.functions import FunctionCell, FunctionColumn
from recipes.runs.ledger import doubled_and_left_out
from recipes.signs import zero_one_volume as volume
from recipes.studies import digits, fashion, gap, glue, rates, rounds, time_to_loss
from recipes.tables.methods import STEADY_GAP
from recipes.tuning.tuning import TUNING_SEED, TunedRecipe
from tests.cli.harness import TOY, assert_same_run, cli
from tests.grids import nonempty
from tests.recipes.conftest import write_folder
from tests.recipes.trained import trained
from tests.reference.signs import exchanges, refreshes

FIRST = time_to_loss.FIRST.name


def line(recipe: Recipe, row: str, column: str, seed: int, value: float) -> dict[str, object]:
    """A line of ours.csv, as if the run had been made on another machine."""
    cell = recipe.cell(recipe.row(row), recipe.column(column), "smoke", seed)
    source = {"commit": "abc", "hardware": "a cpu", "workers": 2, "steps": 9, "folder": "f"}
    key = {"recipe": recipe.name, "row": row, "column": column, "scale": "smoke", "seed": seed}
    return {**key, "value": value, **source, "command": cell.command, "digest": cell.digest}


def write_ours(lines: Sequence[dict[str, object]]) -> None:
    measured.write(Path("results/ours.csv"), lines)


def loss_of(cells: Sequence[FunctionCell]) -> None:
    """Of a toy: a figure of its settings; the second seed fails."""
    for cell in cells:
        if cell.seed != 1:
            cell.finish({"loss": cell.settings["a"] + cell.settings["b"] + cell.seed}, 4, 9)


def test_a_function_is_a_run_like_others(place: Path) -> None:
    column = FunctionColumn("x", ("a=1.5",), "final.loss", curve=False, train=loss_of)
    recipe = Recipe("function", "F", "Text.", (Row("r", ("b=2", "c=true")),), (column,), (0, 1, 2))
    asked, lines = [cell for *_, cell in recipe.cells("smoke")], []
    assert all(cell.settings["c"] is True for cell in asked)
    assert functions.run([*asked, *asked], lines.append) == [asked[1]]
    assert len(lines) == 1 and lines[0].startswith("3 trainings of function")
    assert collect([recipe], place, "smoke") == (2, 0)
    rows = measured.read(place / "ours.csv")
    assert [(row["seed"], row["value"]) for row in rows] == [("0", "3.5"), ("2", "5.5")]
    assert rows[1]["command"] == "python -m recipes run function --seeds 2  # a=1.5 b=2 c=true"
    assert rows[0]["workers"] == "4" and rows[0]["steps"] == "9" and rows[0]["commit"]
    assert (place / rows[0]["folder"] / "summary.json").exists()
    assert functions.run(asked, lines.append) == [asked[1]], "what has finished is kept"
    assert lines[1].startswith("1 trainings")


def test_digits_train_under_every_row(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        for row in digits.RECIPE.rows:
            words = ("optimizer=sgd", "replicas=1", "steps=48", "tau=3", *row.overrides)
            final = digits.train(FunctionCell("digits", words, 0, digits.train_all))
            assert 0.15 < final["accuracy"] < 1, row
            assert 0 < final["cross_entropy"] < 2.2, "guessing has 2.3"
    finally:
        torch.distributed.destroy_process_group()


def test_fashion_is_chosen_and_shown_on_different_images() -> None:
    """Also: 64 images in a step for any number of replicas, every trial a run of its own."""
    recipe = fashion.RECIPE
    trials = [cell for *_, cell in recipe.trials.cells("smoke")]
    assert len({cell.command for cell in trials}) == len(trials) == 2 * (4 * 4 + 3 * 16)
    for cell in trials[::5]:  # some of each row, with both columns: composing takes time
        config = cell.config()
        assert config.data.validation is Validation.tuning
        assert config.train.batch_size * config.launch.workers == config.train.global_batch == 64
    for row, column in recipe.places("smoke"):
        config = composed_config(own_words((*column.overrides, *row.overrides)))
        assert config.data.validation is Validation.report and config.train.steps == 3600
        assert config.optim.name is Optimizer.sgd and config.optim.lr == 0.1, "conf's, if untuned"
        gap = getattr(config.method_config, "gap_penalty", None)
        assert (gap == "gap_aware") == (row.name == "CO2, paper's gap")
    summary = {"final": {"top1": 0.875}}
    assert recipe.columns[0].value(summary) == 87.5
    assert recipe.trials.columns[0].value(summary) == 12.5


def test_the_field_counts_rounds(tmp_path: Path) -> None:
    """By the run's own τ and fragments, which may have been tuned."""
    told = {"steps": 480, "folder": str(tmp_path)}
    nodes = {"co2": {"tau": 12}, "streaming_diloco": {"tau": 12, "fragments": 4}, "allreduce": {}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(nodes))
    assert cells.rounds({**told, "method": "allreduce"}) == 480
    assert cells.rounds({**told, "method": "co2"}) == 40
    assert cells.rounds({**told, "method": "streaming_diloco"}) == 160
    assert cells.rounds({**told, "method": "zero_one_adam", "rounds": 285}) == 285


def test_time_to_a_loss_is_taken_from_the_evaluations(place: Path) -> None:
    recipe = time_to_loss.RECIPE
    losses = {FIRST: (5.0, 4.5), "CO2, steady gap": (5.0, 4.6), "Local SGD": (4.4, 4.3)}
    folders = {}
    for name, (early, late) in losses.items():
        evals = [
            {"kind": "eval", "step": step, "loss": loss, "train_s": seconds}
            for step, loss, seconds in ((24, early, 10.0), (48, late, 20.0))
        ]
        folder = str(write_folder(place / name, lines=evals))
        folders[name] = {"folder": folder, "final": {"loss": late}, "train_s": 20.0}
    first = folders[FIRST]
    seconds, ratio = recipe.columns[:2]
    values = {
        name: (seconds.value(own, first), ratio.value(own, first)) for name, own in folders.items()
    }
    never = float("inf")
    assert values == {FIRST: (20, 1), "CO2, steady gap": (never, never), "Local SGD": (10, 0.5)}


def test_what_reached_the_loss_soonest_is_trained(place: Path) -> None:
    """With the type on the wire, τ and length of schedule that it had in its trial."""
    recipe, (trial,) = time_to_loss.RECIPE, time_to_loss.RECIPE.trials.columns
    grid = time_to_loss.trials_of(recipe.row("CO2, steady gap"))
    assert len({row.overrides for row in grid}) == 12
    assert len({row.overrides for row in time_to_loss.trials_of(time_to_loss.ALLREDUCE)}) == 6
    reached = {row: math.inf if at != 10 else 40.0 for at, row in enumerate(grid)}
    write_ours(
        [line(recipe.trials, row.name, trial.name, 0, value) for row, value in reached.items()]
    )
    seconds = recipe.columns[0]
    cells = {row.name: cell for row, column, _, cell in recipe.cells("smoke") if column is seconds}
    assert set(cells) == {FIRST, "CO2, steady gap"}, "the others have no trials yet"
    unlimited, slow = cells[FIRST], cells["CO2, steady gap"]
    assert unlimited.trial.mbit is None and slow.trial.mbit == 20
    own = {"co2.tau=48", "comm.dtype=bf16", "train.steps=1440", "optim.warmup_steps=60"}
    assert own <= set(slow.overrides)


def test_replica_steps_that_a_loss_has_cost(place: Path) -> None:
    """Four replicas, of which one is lost in its fifth round and is back with the eighth."""
    recipe = goodput.RECIPE
    cell = recipe.cell(recipe.row("CO2, launch.elastic"), recipe.columns[0], "smoke", 0)
    run = goodput.Elastic(cell)
    changes = ({"lost": {"3": "killed"}, "joined": []}, {"lost": {}, "joined": [4]})
    # Its fifth round counts as trained on until the others know; in two more there are three.
    made = 4 * (run.steps - 1) - 2 * goodput.TAU
    summary = {"throughput": 8 * made / 100, "train_s": 100.0}
    write_folder(run.folder, summary, [{"kind": "members", **change} for change in changes])
    (run.folder / "config.yaml").write_text("train: {batch_size: 8}")
    assert run.missing() == pytest.approx(3 * goodput.TAU)
    assert run.is_back({1, 2, 3, 4})


def test_samples_that_are_doubled_or_left_out(tmp_path: Path) -> None:
    """Two workers and eight samples, one sample a step: a run that was started again from draw 3,
    where one line of the first start tells a sample for the second time."""
    first = {"1": [[0, 0, [0]], [1, 0, [2]], [2, 0, [4]], [3, 0, [6]], [4, 1, [0]]]}
    first["2"] = [[0, 0, [1]], [1, 0, [2]]]
    again = {"3": [[3, 0, [6]], [4, 1, [0]], [5, 1, [1]]], "4": [[3, 0, [7]], [4, 1, [3]]]}
    folders = [tmp_path / "1", tmp_path / "now"]
    for folder, ledger in zip(folders, (first, again), strict=True):
        folder.mkdir()
        for name, lines in ledger.items():
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            (folder / f"{name}.jsonl").write_text(f"{text}[6, 1,")
    doubled, left_out = doubled_and_left_out(folders, samples=8)
    assert doubled == 1, "sample 2; sample 6 only as the first start's fourth step is lost"
    assert left_out == 2, "3 and 5; the second epoch is not whole"
    assert doubled_and_left_out([], samples=8) == (0, 0)


def test_a_fine_tuning_starts_from_the_run_of_its_row(place: Path) -> None:
    """Which comes before it, with the rate that won, and lies where the recipe says."""
    trials = glue.RECIPE.trials
    losses = {row.name: 4.0 + n % 4 * (n % 2) for n, row in enumerate(trials.rows)}
    write_trials(trials, losses)
    made: list[str] = []
    for row, column, seed, cell in glue.RECIPE.cells("smoke", (1,)):
        if column is glue.PRETRAINING:
            made.append(str(glue.folder(cell)))
            if row.name in ("AllReduce", "0/1 Adam"):
                assert run_folder(cell.config()) == glue.folder(cell).absolute()
            assert "optim.lr=1e-3" in cell.overrides, "the first of the best"
            continue
        assert "method=allreduce" in cell.overrides and f"train.seed={seed}" in cell.overrides
        assert not any(word.startswith("optim.lr=") for word in cell.overrides)
        starts = [word for word in cell.overrides if word.startswith("init_from=")]
        assert starts == ([] if row is glue.NEW else [f"init_from={made[-1]}"])
    assert len(made) == len(set(made)) == 5, "each row has a pre-training of its own"


def cell(runs: Path, *overrides: str) -> TrainCell:
    return TrainCell((*TOY, "train.steps=12", f"runs={runs}", *overrides))


def test_cells_are_the_runs_of_train_py_and_a_failed_one_loses_no_other(tmp_path: Path):
    runs = tmp_path / "runs"
    good = cell(runs, "method=co2", "co2.tau=3", "launch.workers=2")
    diverges = cell(runs, "method=local_sgd", "optim.lr=1e30", "launch.workers=2")
    alone = cell(runs, "method=slowmo", "launch.workers=1")
    last = cell(runs, "method=allreduce", "launch.workers=2")
    failed, lines = trained([good, diverges, alone, good, last], tmp_path)
    assert failed == {diverges: DIVERGED}
    assert [c.summary() is not None for c in (good, diverges, alone, last)] == [1, 0, 1, 1]
    assert lines[0].startswith("1 runs of 1 workers") and "3 runs of 2 workers" in lines[1]
    assert any("failed with exit status 65" in line and "lr=1e30" in line for line in lines)

    failed, lines = trained([good, alone, last], tmp_path)
    assert failed == {}
    assert lines == [], "nothing is trained twice"

    overrides = [o for o in good.overrides if not o.startswith("runs=")]
    by_hand = cli(*overrides, runs=tmp_path / "by_hand")
    assert_same_run(run_folder(good.config()), by_hand.folder)

    settings = run_folder(good.config()) / "config.yaml"
    settings.write_text(settings.read_text().replace("  steps: 12\n", "  steps: 13\n"))
    with pytest.raises(ConfigError, match=r"holds a run with train\.steps=13"):
        good.summary()


def test_a_cell_may_start_from_the_run_of_one_before_it(tmp_path: Path):
    """And is refused where that one has failed, which stops no other."""
    runs = tmp_path / "runs"
    first = cell(runs, "method=co2", "launch.workers=2")
    start = f"init_from={run_folder(first.config())}"
    second = cell(runs, "method=allreduce", "launch.workers=2", start)
    lost = cell(runs, "method=allreduce", "launch.workers=2", f"init_from={tmp_path / 'none'}")
    failed, _ = trained([first, second, lost], tmp_path)
    assert list(failed) == [lost]
    assert first.summary() is not None and second.summary() is not None


def test_a_cell_that_cannot_be_run_is_refused_before_any_is(tmp_path: Path):
    good = cell(tmp_path / "runs", "method=co2", "launch.workers=2")
    with pytest.raises(ConfigError, match="nothing"):
        run([good, cell(tmp_path / "runs", "method=nothing")])
    assert not (tmp_path / "runs").exists()


def test_a_run_takes_each_key_once_and_no_other_methods_words() -> None:
    def kept(words: str) -> str:
        return " ".join(own_words(tuple(words.split())))

    column = "task=vit slowmo.tau=48 co2_keep.tau=48 co2_keep.delay=12 comm.dtype=bf16"
    keep = "task=vit co2_keep.tau=48 co2_keep.delay=null comm.dtype=bf16 method=co2_keep"
    assert kept(f"{column} method=co2_keep co2_keep.delay=null") == keep
    assert kept(f"{column} method=allreduce") == "task=vit comm.dtype=bf16 method=allreduce"
    # A row multiplies what its column gives.
    column = "task=gpt2 optim.lr=2.5e-3 train.steps=960"
    made = "task=gpt2 optim.lr=0.005 train.steps=1440 method=co2"
    assert kept(f"{column} method=co2 optim.lr=×2 train.steps=×1.5") == made
    with pytest.raises(KeyError):
        own_words(("optim.lr=×2",))


def halving(step: int) -> float:
    return 0.5 ** (step // 100)


def test_a_training_by_hand() -> None:
    training = volume.Training(400, 60, 40, halving, "made up")
    assert volume.allreduce(training).bits == 16 * 400
    assert volume.onebit_adam(training).bits == 16 * 60 + 340
    sent = volume.zero_one_adam_(training)
    # 100 steps of interval 1, then 2, 4 and 8; refreshes at 0 to 16, then at 18, 20 … 38.
    assert sent.rounds == 100 + 50 + 25 + 13
    assert sent.bits == 16 * (17 + 11) + sent.rounds


@pytest.mark.parametrize("name", ["BERT-large", "ImageNet"])
def test_a_published_training_is_the_union_of_its_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.reference.signs.HORIZON", 30_000)
    training = volume.TRAININGS[name]
    short = volume.Training(20_000, training.freeze_step, 9_000, training.lr, "")
    due_v = refreshes(short.warmup, volume.KAPPA)
    due_u = [t for t in exchanges(short.warmup, 10**9, volume.LONGEST) if t < short.steps]
    sent = volume.zero_one_adam_(short)
    assert set(due_v) <= set(due_u)
    assert sent.rounds == len(due_u)  # up to here no rate has halved
    assert sent.bits == volume.BITS * len(due_v) + len(due_u)


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
    return recipe.cell(recipe.row(row), recipe.column(column), scale, 0).overrides


def test_the_longest_training_has_the_rate_of_one_that_was_tuned(place: Path) -> None:
    write_trials(rounds.RECIPE.trials, {f"{CO2}, rate 8e-3": 3.0}, (f"{CO2}, rate", "DiLoCo"))
    tuned = {rounds.DILOCO, rounds.CO2}
    bases = {row: row for row in rounds.ROWS} | rounds.VARIANTS | rounds.ALONE
    places = rounds.RECIPE.places("smoke")
    left = sum(bases[row] not in tuned for row, _ in places)
    assert rounds.RECIPE.undecided("smoke") == left, "variants need no trials"
    assert [rounds.tuned_rounds(r) for r in rounds.CURVE] == [25, 25, 100, 300, *[300] * 6]
    cells = [cell for *_, cell in rounds.RECIPE.trials.cells("smoke")]
    rivals = len(rounds.RIVALS) * 3
    parts = (1 + 1 + 2) * 4 * 2
    assert len(cells) == len(rounds.BASES) * 4 * 3 + 3 + rivals + parts, "four rates, DiLoCo five"
    for r in rounds.ROUNDS:
        own = words(rounds.RECIPE, CO2, rounds.name(r))
        assert f"train.steps={12 * r}" in own and "optim.lr=8e-3" in own
        assert f"optim.warmup_steps={12 * r // 25}" in own, "4 %"
    assert "optim.lr=1e-3" in words(rounds.RECIPE, "DiLoCo", "1,000 rounds"), "the first of equals"
    with pytest.raises(LookupError, match="trials of rounds_trials are missing"):
        words(rounds.RECIPE, "AllReduce", "25 rounds")

    trials = rounds.RECIPE.trials
    last = trials.cell(trials.row("DiLoCo, rate 1.6e-2"), trials.columns[0], "smoke", TUNING_SEED)
    write_folder(run_folder(last.config()), {"final": {"loss": 1.0}})
    assert "optim.lr=1.6e-2" in words(rounds.RECIPE, "DiLoCo", "25 rounds"), "a run here first"


def test_tuned_values_survive_a_clone(place: Path) -> None:
    """Although no run is here."""
    recipe, ours = rounds.RECIPE, Path("results/ours.csv")
    write_trials(recipe.trials, {}, (f"{CO2}, rate",))
    trials = measured.read(ours)
    values = [line(recipe, CO2, "25 rounds", seed, 3.0 + seed) for seed in (0, 1)]
    write_ours([*trials, *values])
    assert collect([recipe], place / "results", "smoke") == (0, 2)
    assert len(measured.read(ours)) == len(trials) + 2


def test_the_best_rate_is_at_the_bottom_of_a_parabola() -> None:
    tried = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
    found = {rate: 3 + math.log(rate / 5e-3) ** 2 for rate in tried}
    assert rates.optimum(found) == pytest.approx(5e-3)
    bent = {**found, 1e-3: 99.0, 1.6e-2: 99.0}
    assert rates.optimum(bent) == pytest.approx(5e-3), "of the best and its neighbours alone"
    assert rates.optimum({rate: rate for rate in tried}) is None, "at the border"
    assert rates.optimum({}) is None


def test_the_paper_s_scalability_is_beside_the_same_methods() -> None:
    overrides = {row.name: row.overrides for row in table3.RECIPE.rows}
    for name, row in nonempty(table3.BESIDE.items()):
        method, tau = scaling.METHODS[name]
        longer = () if tau in (1, 12) else (f"{method}.tau={tau}",)
        assert overrides[row] == (f"method={method}", *longer), name


def test_a_tau_has_the_rate_of_the_nearest_that_was_tuned(place: Path) -> None:
    assert [tau_sweep.nearest(tau) for tau in tau_sweep.TAUS] == [3, 3, 3, 24, 24, 24, 96, 96]
    lowest = {f"{CO2}, τ = 24, rate 8e-3": 3.0, f"{CO2}, τ = 96, rate 4e-3": 3.0}
    write_trials(tau_sweep.RECIPE.trials, lowest, (CO2,))
    found = words(tau_sweep.RECIPE, f"{CO2}, τ = 12", "overlap, %")
    assert "co2.tau=12" in found and "optim.lr=8e-3" in found and "co2.tau=24" not in found
    assert "optim.lr=4e-3" in words(tau_sweep.RECIPE, f"{CO2}, τ = 192", "overlap, %")
    assert tau_sweep.RECIPE.undecided("smoke") == 2 * 17, "one row of CO2 alone is tuned"


@pytest.mark.parametrize("recipe", STUDIES.values(), ids=STUDIES)
def test_what_won_composes(recipe: TunedRecipe, place: Path) -> None:
    """test_tables.py composes their trials."""
    write_trials(recipe.trials, {}, BEGIN[recipe.name])
    made = {row.overrides: cell for row, _, _, cell in recipe.cells("smoke", (0,))}
    assert made
    for cell in made.values():
        assert cell.config().data.validation.value == "report", "not what was tuned on"
    for *_, cell in recipe.trials.cells("smoke"):
        assert "data.validation=tuning" in cell.command and f"seed={TUNING_SEED}" in cell.command
