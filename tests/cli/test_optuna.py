"""A search in place of a grid: hydra/sweeper=optuna."""

import dataclasses
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import train
from co2.app.application import objective
from co2.app.compose import jobs, preflight, scored_apart
from co2.config import Validation
from co2.errors import DIVERGED, ConfigError
from co2.record.console import Outcome, sweep_table
from co2.record.metrics import Summary
from tests.cli.harness import TOY, cli, folders
from tests.cli.test_runs import summary

SWEEPER = "hydra/sweeper=optuna"
installed = pytest.mark.skipif(find_spec("optuna") is None, reason="needs the extra: .[optuna]")


@installed
def test_search(tmp_path: Path) -> None:
    """Trials, the best of them, and the table; the same command makes the same trials."""
    runs = tmp_path / "runs"
    words = [
        "-m",
        SWEEPER,
        "launch.workers=1",
        "train.steps=12",
        "method=co2",
        "co2.tau=3",
    ]
    words += ["hydra.sweeper.n_jobs=1"]
    words += ["co2.outer_lr=interval(.3,1.5)", "co2.outer_momentum=0.1,0.5", "train.seed=0"]
    ended = cli(*words, "hydra.sweeper.n_trials=2", runs=runs)
    assert ended.status == 0, ended.err
    assert len(folders(runs)) == 2

    ended = cli(*words, "hydra.sweeper.n_trials=3", runs=runs)
    assert ended.status == 0, ended.err
    assert ended.out.count("finished already") == 2
    assert len(folders(runs)) == 3
    table = ended.out[ended.out.index("sweep: ") :]
    finals = {}
    for folder in folders(runs):
        values = yaml.safe_load((folder / "config.yaml").read_text())
        assert values["data"]["validation"] == "tuning", "what is reported chooses nothing"
        config = values["co2"]
        assert 0.3 <= config["outer_lr"] <= 1.5 and config["outer_momentum"] in (0.1, 0.5)
        assert config["tau"] == 3 and summary(folder)["steps"] == 12
        finals[summary(folder)["final"]["loss"]] = config
    best = min(finals)
    assert table.count("│ co2.outer_lr=") == 3
    assert (
        f"lowest validation loss: {best:.4f} with co2.outer_lr={finals[best]['outer_lr']} " in table
    )
    assert table.endswith(", scored on data.validation=tuning\n")
    found = yaml.safe_load((runs / ".multirun" / "optimization_results.yaml").read_text())
    assert found["best_value"] == best
    assert found["best_params"]["co2.outer_lr"] == finals[best]["outer_lr"]


@installed
@pytest.mark.slow
def test_every_trial_fails(tmp_path: Path) -> None:
    """There is no best one, and the table says why."""
    words = (
        *("method=co2", "co2.tau=3,6", "hydra.sweeper.n_trials=2", "launch.workers=1"),
        *("optim.lr=1e30", "train.steps=12", "train.eval_every=6"),
    )
    ended = cli("-m", SWEEPER, *words, runs=tmp_path)
    assert ended.status == DIVERGED
    why = f"the loss is not finite (exit status {DIVERGED})"
    assert ended.out[ended.out.index("sweep: ") :].count(why) == 2
    assert "No trials are completed" not in ended.err


def test_a_search_takes_other_data_where_they_are_named() -> None:
    tuning = "data.validation=tuning"
    assert scored_apart([SWEEPER, "-m"]) == [tuning, SWEEPER, "-m"]
    for words in (["-m", SWEEPER, "data.validation=all"], ["-m", "co2.tau=1,3"]):
        assert scored_apart(words) == words


def test_what_a_search_makes_small() -> None:
    assert objective(0, finished("toy", {"loss": 0.5, "accuracy": 1.0})) == 0.5
    assert objective(0, finished("toy", {"loss": None})) == math.inf
    assert objective(DIVERGED, None) == math.inf, "a bad place, and worth knowing"
    assert objective(1, None) is None


@installed
@pytest.mark.parametrize(
    "value", ["interval(0.1,1.5)", "choice(0.5,1.0)", "tag(log,interval(1,2))"]
)
def test_the_ends_are_checked_before_anything_starts(value: str) -> None:
    words = ["-m", *TOY, "method=co2", SWEEPER, f"co2.outer_momentum={value}"]
    with pytest.raises(ConfigError, match=r"co2\.outer_momentum=(1|1\.0|1\.5): "):
        preflight(train.APP.conf, words, train.APP.validate)


def test_an_interval_is_for_a_search() -> None:
    found = list(jobs([SWEEPER, "co2.clip=interval(0.1,2)", "co2.tau=3,6"]))
    assert [job[1:] for job in found] == [
        [f"co2.clip={clip}", f"co2.tau={tau}"] for clip in (0.1, 2.0) for tau in (3, 6)
    ]
    with pytest.raises(ConfigError, match=r"co2\.clip=interval.*hydra/sweeper=optuna"):
        list(jobs(["co2.clip=interval(0.1,2)"]))


@pytest.mark.parametrize("plugin", ["sweeper=optuna", "launcher=submitit_slurm"])
def test_only_for_sweeps(plugin: str) -> None:
    with pytest.raises(ConfigError, match=rf"{plugin}: .*add -m"):
        preflight(train.APP.conf, [*TOY, f"hydra/{plugin}"], lambda *job: None)


@pytest.mark.parametrize(
    ("plugin", "own"), [("sweeper=optuna", "optuna"), ("launcher=submitit_slurm", "slurm")]
)
def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, plugin: str, own: str) -> None:
    monkeypatch.setattr("co2.app.compose.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"{plugin}: .*\.\[{own}\]"):
        preflight(train.APP.conf, ["-m", *TOY, f"hydra/{plugin}"], lambda *job: None)


def finished(task: str, final: dict[str, float | None]) -> Summary:
    """A summary of which only the final metrics matter here."""
    figures: dict[str, Any] = {
        field.name: "" if field.type is str else None for field in dataclasses.fields(Summary)
    }
    return Summary(**{**figures, "task": task, "final": final, "throughput": 1.0, "own": {}})


def outcome(
    task: str, *overrides: str, loss: float, validation: Validation = Validation.report
) -> Outcome:
    words = (f"task={task}", *overrides)
    return Outcome(words, 0, finished(task, {"loss": loss}), validation)


def test_the_best_of_a_sweep() -> None:
    worse, best = (outcome("toy", f"co2.tau={loss}", loss=loss) for loss in (0.5, 0.25))
    failed = Outcome(("task=toy", "co2.tau=9"), 1, None, Validation.all)
    told = "lowest validation loss: 0.2500 with co2.tau=0.25, scored on data.validation=report"
    assert told in sweep_table([worse, failed, best])
    other = outcome("toy", loss=0.1, validation=Validation.tuning)
    for others in ([best], [worse, outcome("gpt2", loss=0.1)], [failed, best], [worse, other]):
        assert "lowest" not in sweep_table(others), "nothing to compare with"
