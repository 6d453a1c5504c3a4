"""Experiments with trials, functions in place of runs, or tables of their own."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from co2.config import Optimizer, Validation
from co2.record.folder import run_folder
from recipes.faults import goodput
from recipes.recipe import Recipe, Row
from recipes.runs import cells, functions, measured
from recipes.runs.cells import TrainCell, composed_config, own_words
from recipes.runs.collect import collect
from recipes.runs.functions import FunctionCell, FunctionColumn
from recipes.runs.laboratory import LabCell
from recipes.runs.ledger import doubled_and_left_out
from recipes.studies import (
    digits,
    fashion,
    field,
    glue,
    kept_progress,
    kept_variants,
    quality,
    time_to_loss,
)
from recipes.tables import layout
from recipes.tuning.tuning import TUNING_SEED
from tests.recipes.lab_run import write_run

FIRST = time_to_loss.FIRST.name
PLACE = "gpt2, τ = 12, 2 replicas"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def line(recipe: Recipe, row: str, column: str, seed: int, value: float) -> dict[str, object]:
    """A line of ours.csv, as if the run had been made on another machine."""
    cell = recipe.cell(recipe.row(row), recipe.column(column), "smoke", seed)
    source = {"commit": "abc", "hardware": "a cpu", "workers": 2, "steps": 9, "folder": "f"}
    key = {"recipe": recipe.name, "row": row, "column": column, "scale": "smoke", "seed": seed}
    return {**key, "value": value, **source, "command": cell.command, "digest": cell.digest}


def write_ours(lines: Sequence[dict[str, object]]) -> None:
    measured.write(Path("results/ours.csv"), lines)


def write_summary(cell: object, loss: float) -> None:
    assert isinstance(cell, TrainCell)
    folder = run_folder(cell.config())
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"final": {"loss": loss}}))


def test_what_was_tuned_is_read_from_the_commands() -> None:
    ours = [
        {"row": row, "column": PLACE, "seed": "0", "value": "5", "command": command}
        for row in ("AllReduce", "DiLoCo")
        for command in (f"python train.py tuned=true  # optim.lr=0.004 {row.lower()}.x=true",)
    ]
    (table,) = kept_progress.chosen(ours, [])
    assert [*table.rows[1]][:2] == ["DiLoCo", "lr 0.004, x true"]
    assert len(table.rows) == 2, "what has no value is not listed"
    assert list(kept_progress.chosen([], [])) == []


def test_two_replicas_and_four_see_as_many_samples() -> None:
    for task, samples in kept_progress.SAMPLES.items():
        for replicas in (2, 4):
            words = kept_progress.words(task, 12, replicas)
            conf = composed_config((*words, "method=co2_keep", "scale=smoke"))
            assert conf.train.batch_size * conf.launch.workers == samples
            assert conf.launch.workers == replicas
    assert kept_progress.words("vit", 12, 2) == ("task=vit",), "the runs of table1"


def loss_of(cells: Sequence[FunctionCell]) -> None:
    """Of a toy: a figure of its settings; the second seed fails."""
    for cell in cells:
        if cell.seed != 1:
            cell.finish({"loss": cell.settings["a"] + cell.settings["b"] + cell.seed}, 4, 9)


def test_a_function_is_a_run_like_others(place: Path) -> None:
    column = FunctionColumn("x", ("a=1.5",), "final.loss", curve=False, train=loss_of)
    recipe = Recipe("function", "F", "Text.", (Row("r", ("b=2", "c=true")),), (column,), (0, 1, 2))
    cells = [cell for *_, cell in recipe.cells("smoke")]
    assert all(isinstance(cell, FunctionCell) and cell.settings["c"] is True for cell in cells)
    asked = [cell for cell in cells if isinstance(cell, FunctionCell)]
    lines: list[str] = []
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


def test_variants_are_what_their_names_tell() -> None:
    recipe = kept_variants.RECIPE
    for name, variant in kept_variants.VARIANTS.items():
        cell = recipe.cell(recipe.row(name), recipe.columns[0], "smoke", 2)
        assert isinstance(cell, FunctionCell)
        assert kept_variants.variant_of(cell) == variant
    commands = {cell.command for *_, cell in recipe.cells("smoke")}
    assert len(commands) == len(kept_variants.VARIANTS) * 3


@pytest.mark.slow  # trains a whole study's model three times
def test_a_variant_is_simulated() -> None:
    """The share of progress that is kept matters only where a mean arrives late."""
    config = copy.deepcopy(kept_variants.config(18, 0))
    config.train.batch_size = 2

    def loss(variant: kept_variants.Variant) -> float:
        return kept_variants.Simulation(config, variant).run()

    blocking = loss(kept_variants.Variant(delay=0))
    assert loss(kept_variants.Variant(delay=0, kept=0.5)) == blocking, "no progress meanwhile"
    late = loss(kept_variants.Variant(delay=3))
    assert loss(kept_variants.Variant(delay=3, kept=0.5)) != late != blocking


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


def test_digits_say_whether_the_effect_shows() -> None:
    def rows(without: Sequence[float], aware: Sequence[float]) -> list[dict[str, str]]:
        return [
            {"row": name, "column": "sgd, cross-entropy", "value": str(value)}
            for name, values in ((digits.NONE, without), (digits.GAP_AWARE, aware))
            for value in values
        ]

    effect, simulation = digits.verdicts(rows([1.0, 1.2], [0.2, 0.3]), [])
    assert effect.rows == [("sgd", "0.850", "0.212", "yes")]
    assert ("sgd", digits.NONE, "1.100 ± 0.141", "1.5 ± 0.6") in simulation.rows
    effect, _ = digits.verdicts(rows([0.4, 0.2], [0.2, 0.3]), [])
    assert effect.rows[0][3] == "no"
    assert list(digits.verdicts([], [])) == []


def test_fashion_is_chosen_and_shown_on_different_images() -> None:
    """Also: 64 images in a step for any number of replicas, every trial a run of its own."""
    recipe = fashion.RECIPE
    trials = [cell for *_, cell in recipe.trials.cells("smoke")]
    assert len({cell.command for cell in trials}) == len(trials) == 2 * (3 * 4 + 3 * 16)
    for cell in trials:
        assert isinstance(cell, TrainCell)
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


def test_quality_counts_the_seeds_that_reach_the_goal() -> None:
    language = f"GPT-2, {quality.ENTROPY}"
    values = {"ViT, top-1 %": (90.0, 89.9), language: (99.9, 100.0, 20.0)}
    ours = [
        {"row": "CO2, steady gap", "column": column, "seed": str(seed), "value": str(value)}
        for column, own in {**values, "ViT, waiting for data %": (1.0, 2.0)}.items()
        for seed, value in enumerate(own)
    ]
    goals, waiting = quality.tables(ours, [])
    assert [*goals.head] == ["method", "ViT, top-1 % ≥ 90", f"{language} < 100"]
    assert goals.rows == [["CO2, steady gap", "1 of 2", "2 of 3"]]
    assert waiting.rows == [["CO2, steady gap", "1.5"]]
    summary = {"final": {"loss": 4.0}, "baselines": {"unigram_entropy": 5.0}}
    assert quality.RECIPE.column(language).value(summary) == 80


def test_the_field_counts_rounds_and_takes_shares_of_the_limit(place: Path) -> None:
    told = {"task": "gpt2", "steps": 480}
    assert cells.rounds({**told, "method": "allreduce"}) == 480
    assert cells.rounds({**told, "method": "co2"}) == 40
    assert cells.rounds({**told, "method": "streaming_diloco"}) == 80
    assert cells.rounds({**told, "method": "zero_one_adam", "rounds": 285}) == 285

    where = field.share("gpt2", "20")
    adam, limit = (
        field.RECIPE.cell(field.RECIPE.row(row), field.RECIPE.column(where), "smoke", 0)
        for row in ("onebit_adam", "no communication")
    )
    assert isinstance(adam, LabCell) and adam.overrides == ("onebit_adam.freeze_step=10",)
    assert isinstance(limit, LabCell)
    write_run(adam, 3_000.0)
    write_run(limit, 12_000.0)
    assert collect([field.RECIPE], place, "smoke") == (2, 0)
    values = {(r["row"], r["column"]): float(r["value"]) for r in measured.read(place / "ours.csv")}
    assert values == {("onebit_adam", where): 25, ("no communication", where): 100}
    (table,) = layout.tables(field.RECIPE, measured.read(place / "ours.csv"), [], "smoke")
    assert [row[0] for row in table.rows] == ["onebit_adam", "no communication"]
    assert [row[1] for row in table.rows] == ["25.0", "100.0"]


def test_time_to_a_loss_is_taken_from_the_evaluations(place: Path) -> None:
    recipe = time_to_loss.RECIPE
    losses = {FIRST: (5.0, 4.5), "CO2, steady gap": (5.0, 4.6), "Local SGD": (4.4, 4.3)}
    folders = {}
    for name, (early, late) in losses.items():
        folder = place / name
        folder.mkdir()
        folders[name] = {"folder": str(folder), "final": {"loss": late}, "train_s": 20.0}
        evals = [
            {"kind": "eval", "step": step, "loss": loss, "train_s": seconds}
            for step, loss, seconds in ((24, early, 10.0), (48, late, 20.0))
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in evals))
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
    write_ours(
        [
            line(
                time_to_loss.RECIPE.trials,
                row.name,
                trial.name,
                0,
                float("inf") if at != 10 else 40.0,
            )
            for at, row in enumerate(grid)
        ]
    )
    seconds = recipe.columns[0]
    cells = {row.name: cell for row, column, _, cell in recipe.cells("smoke") if column is seconds}
    assert set(cells) == {FIRST, "CO2, steady gap"}, "the others have no trials yet"
    unlimited, slow = cells[FIRST], cells["CO2, steady gap"]
    assert isinstance(unlimited, LabCell) and unlimited.trial.mbit is None
    assert isinstance(slow, LabCell) and slow.trial.mbit == 20
    own = {"co2.tau=48", "comm.dtype=bf16", "train.steps=1440", "optim.warmup_steps=60"}
    assert own <= set(slow.overrides)


def test_replica_steps_that_a_loss_has_cost(place: Path) -> None:
    """Four replicas, of which one is lost in its fifth round and is back with the eighth."""
    recipe = goodput.RECIPE
    cell, other = (
        recipe.cell(recipe.row(name), recipe.columns[0], "smoke", 0)
        for name in ("CO2, launch.elastic", "DiLoCo, torchft")
    )
    assert isinstance(cell, FunctionCell)
    assert isinstance(other, FunctionCell)
    run = goodput.Elastic(cell)
    changes = ({"lost": {"3": "killed"}, "joined": []}, {"lost": {}, "joined": [4]})
    run.folder.mkdir(parents=True)
    lines = [json.dumps({"kind": "members", **change}) + "\n" for change in changes]
    (run.folder / "metrics.jsonl").write_text("".join(lines))
    (run.folder / "config.yaml").write_text("train: {batch_size: 8}")
    # Its fifth round counts as trained on until the others know; in two more there are three.
    made = 4 * (run.steps - 1) - 2 * goodput.TAU
    summary = {"throughput": 8 * made / 100, "train_s": 100.0}
    (run.folder / "summary.json").write_text(json.dumps(summary))
    assert run.missing() == pytest.approx(3 * goodput.TAU)
    assert run.is_back({1, 2, 3, 4})

    torchft = goodput.Discarding(other)
    torchft.place.mkdir(parents=True)
    lost, back = 4 * goodput.TAU + 5, 7 * goodput.TAU
    newcomer = {*range(1, goodput.TAU), *range(back, torchft.steps + 1)}
    made_by = {name: set(range(1, torchft.steps + 1)) for name in ("0-10", "1-11", "2-12")}
    for name, steps in {**made_by, "3-13": set(range(1, lost + 1)), "3-14": newcomer}.items():
        text = "".join(json.dumps({"step": step}) + "\n" for step in sorted(steps))
        (torchft.place / f"{name}.jsonl").write_text(text + '{"ste')
    assert torchft.missing() == 3 * goodput.TAU, "its five steps of a round are lost with it"
    assert torchft.is_back({10, 11, 12, 13})


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


def test_goodput_is_held_against_the_simulator() -> None:
    values = {goodput.GOODPUT: (98.0, 97.0, 99.0), goodput.BACK: (5.0, 6.0, 7.0)}
    ours = [
        {"row": row.name, "column": column, "seed": str(seed), "value": str(value)}
        for row in goodput.RECIPE.rows
        for column, own in values.items()
        for seed, value in enumerate(own)
    ]
    (table,) = goodput.tables(ours, [])
    simulated = {row[0]: float(row[2]) for row in table.rows}
    assert all(row[1] == "98.0" for row in table.rows)
    # All wait 6 s in 150, and make half of 6 s of steps again; one of four waits 6 s and two half
    # rounds; under torchft the others, too, lose theirs.
    assert simulated["DDP, torchrun"] == pytest.approx(100 * (1 - 9 / 150), abs=0.5)
    assert simulated["CO2, launch.elastic"] == pytest.approx(100 * (1 - 9 / 600), abs=0.5)
    assert simulated["DiLoCo, torchft"] == pytest.approx(100 * (1 - 3 / 150), abs=1.0)
    assert list(goodput.tables([], [])) == []


def test_a_fine_tuning_starts_from_the_run_of_its_row(place: Path) -> None:
    """Which comes before it, with the rate that won, and lies where the recipe says."""
    (trial,) = glue.RECIPE.trials.columns
    write_ours(
        [
            line(
                glue.RECIPE.trials,
                row.name,
                trial.name,
                TUNING_SEED,
                4.0 + number % 4 * (number % 2),
            )
            for number, row in enumerate(glue.RECIPE.trials.rows)
        ]
    )
    made: list[str] = []
    for row, column, seed, cell in glue.RECIPE.cells("smoke", (1,)):
        assert isinstance(cell, TrainCell)
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
