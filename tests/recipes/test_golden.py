"""Results change only where a version says so: a short golden loss of every method and task.

    GOLDEN=write .venv/bin/python -m pytest -n 0 tests/recipes/test_golden.py

writes those whose version is not that of results/golden.json. And the rehearsal of published
recipes, whose golden losses are of their first steps.
"""

import json
import os
from itertools import product
from pathlib import Path

import pytest

from co2.methods import METHODS, Method
from co2.methods.co2 import CO2
from co2.record.provenance import cpu_name
from co2.task import Task
from recipes.rehearse import __main__ as rehearsal
from recipes.rehearse import golden
from recipes.rehearse.__main__ import command, main
from recipes.runs.cells import composed_config
from tasks import TASKS
from tests import loss_recorder
from tests.cli.harness import metrics, pooled, small, tasks_at
from tests.cli.test_training import few_scenes
from tests.grids import grid
from tests.tasks import random_graph
from tests.tasks.conftest import story
from tests.workers import Pool

COMMAND = "GOLDEN=write .venv/bin/python -m pytest -n 0 tests/recipes/test_golden.py"


def compare(part: str, name: str, of: type[Task] | type[Method], losses: list[float]) -> None:
    if os.environ.get("GOLDEN") == "write" and golden.missing(part, name, of, COMMAND):
        golden.write(part, name, of, losses)
    line = golden.missing(part, name, of, COMMAND)
    line = line or golden.objection(part, name, of, losses, COMMAND)
    assert not line, line


def trained(workers: Pool, runs: Path, *words: str) -> list[float]:
    """Training losses, and the validation loss at the end."""
    run = pooled(workers, 2, *words, runs=runs, setup=few_scenes)
    assert run.status == 0, run.err
    return [line["loss"] for line in metrics(run.folder) if line["kind"] != "notice"]


@pytest.mark.parametrize("method", METHODS)
def test_a_method(workers: Pool, tmp_path: Path, method: str) -> None:
    own = [f"{method}.{word}" for word in loss_recorder.OWN.get(method, ())]
    words = loss_recorder.overrides("toy", 2, [f"method={method}", *own])
    if "optim.lr=1e-3" not in words:
        words.append("optim.lr=0.02")
    short = ("train.steps=20", "train.eval_every=20", "log.every=4")
    losses = trained(workers, tmp_path / "runs", *words, *short)
    compare("methods", method, METHODS[method], losses)


@pytest.mark.parametrize("task", TASKS)
def test_a_task(workers: Pool, tmp_path: Path, root: Path, task: str) -> None:
    text = tmp_path / "story.txt"
    text.write_text(story(40_000))
    words = [*small(task, root, text), "method=allreduce", "train.batch_size=4", "log.every=1"]
    if task == "graph":
        words.append(f"data.path={random_graph.write(tmp_path / 'graph').folder}")
    short = ("train.steps=4", "train.eval_every=4", "optim.lr=1e-4")
    compare("tasks", task, TASKS[task], trained(workers, tmp_path / "runs", *words, *short))


def test_a_loss_that_moves_asks_for_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden, "FILE", tmp_path / "golden.json")
    line = golden.missing("methods", "co2", CO2, "COMMAND")
    assert line == "golden.json has no losses of co2, version 1; write them: COMMAND"
    golden.write("methods", "co2", CO2, [2.0, 1.5])
    assert not golden.missing("methods", "co2", CO2, "COMMAND")
    assert not golden.objection("methods", "co2", CO2, [2.0, 1.50001], "COMMAND")
    assert golden.objection("methods", "co2", CO2, [2.0, 1.501], "COMMAND") == (
        "co2: loss 2 is 1.501000, 1.500000 before; if results are to change, "
        "raise `version` in co2.methods.co2.CO2 to 2, then: COMMAND"
    )
    monkeypatch.setattr(CO2, "version", 2)
    assert "no losses of co2, version 2" in golden.missing("methods", "co2", CO2, "COMMAND")
    golden.write("methods", "co2", CO2, [2.0, 1.4])
    known = json.loads(golden.FILE.read_text())["methods"]["co2"]
    assert known == {"version": 2, "cpu": cpu_name(), "losses": [2.0, 1.4]}


@pytest.mark.parametrize(
    ("task", "method"),
    grid(
        product(tasks_at("paper"), rehearsal.METHODS),
        lambda case: "allreduce" in case or "gpt2" in case,
    ),
)
def test_every_command_is_the_published_recipe(task: str, method: str, tmp_path: Path) -> None:
    words = tuple(command(task, method, tmp_path, []))
    config = composed_config(words)
    assert (config.scale, config.train.steps, config.method) == ("paper", 3, method)
    assert config.train.accumulate == 1
    if method == "allreduce":  # by which golden losses are made
        words = tuple(command(task, method, tmp_path, golden.SETTINGS))
        assert composed_config(words).train.steps == golden.STEPS


def test_a_small_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["task=graph", "method=co2"]) == 0
    out = capsys.readouterr().out
    assert "resumed same" in out and out.endswith("1 of 1 went well\n")
