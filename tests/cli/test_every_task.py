"""Every task composes at every scale, trains, stops and goes on exactly."""

import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from hydra import compose, initialize_config_dir

import train
from co2.app.compose import plain
from co2.app.schema import typed
from co2.app.tuned import with_tuned
from co2.methods import METHODS
from co2.record.folder import run_folder
from co2_measure.peers import known_methods
from tasks import TASKS
from tests.cli.harness import (
    ROOT,
    SMALL,
    assert_same_run,
    cli,
    configured,
    metrics,
    pooled,
    small,
    tasks_at,
)
from tests.grids import grid, nonempty
from tests.tasks import random_graph
from tests.workers import Pool

PLACES = [
    (task, scale) for scale in ("smoke", "gpu", "paper") for task in nonempty(tasks_at(scale))
]
PLACES.append(("roberta", "liu"))


def test_every_task_has_the_default_scale() -> None:
    assert tasks_at("smoke") == list(TASKS)
    assert SMALL.keys() <= TASKS.keys()


@pytest.mark.parametrize(("place", "method"), list(zip(PLACES, itertools.cycle(METHODS))))
def test_composes(place: tuple[str, str], method: str) -> None:
    """Every task at every scale, and so every method: none of `conf`'s files depends on a method
    and on a task or a scale."""
    task, scale = place
    choice = [f"task={task}", f"method={method}", f"scale={scale}", "launch.workers=2"]
    with initialize_config_dir(config_dir=str(train.APP.conf), version_base="1.3"):
        values, _ = with_tuned(
            train.APP.conf, plain(compose("config", choice)), choice, train.APP.methods
        )
    config = typed(values, METHODS, TASKS)
    assert (config.task, config.method, config.scale) == (task, method, scale)
    made = train.APP.make_task(config)
    assert made.units_per_sample >= 1 and made.unit in ("tokens", "samples")


def test_every_method_has_a_place() -> None:
    assert len(PLACES) >= len(METHODS)


def test_no_file_depends_on_a_method() -> None:
    """What the test above rests on: Hydra's groups are those, one of task and scale, and what a
    method needs; files of tasks and scales say nothing of methods. What an experiment chooses has a
    test of its own."""
    conf = ROOT / "conf"
    root = yaml.safe_load((conf / "config.yaml").read_text())["defaults"]
    picked = [value for entry in root if isinstance(entry, dict) for value in entry.values()]
    assert [value for value in picked if "${" in str(value)] == ["${task}_${scale}", "${method}"]
    for path in nonempty(conf.rglob("*.yaml")):
        group = path.parent.relative_to(conf)
        assert path == conf / "config.yaml" or group.parts[0] in (
            "task",
            "scale",
            "hydra",
            "tuned",
            "experiment",
            "debug",
        )
        values = yaml.safe_load(path.read_text()) or {}
        if path != conf / "config.yaml" and group.parts != ("experiment",):
            assert "defaults" not in values, path
        if group.parts[:1] in (("task",), ("scale",), ("debug",), ()):
            assert not values.keys() & {"method", *known_methods()}, path


@contextmanager
def few_scenes() -> Iterator[None]:
    """Setup: ADE20K's scenes are 20, not 512, for each of which UperNet takes its time."""
    with patch("tasks.ade20k.scenes.Scenes.__len__", lambda scenes: 20):
        yield


OF_A_TASK = ("resnet50", "ade20k", "shapenet", "gpt2", "roberta", "glue", "graph")
"""A task of each kind. resnet50 stands for vit; gpt2 for moe, which tests/cli/test_mesh.py has, and
for transnormer; the toy is everywhere."""


@pytest.mark.parametrize("task", grid(TASKS, OF_A_TASK.__contains__))
def test_goes_on_exactly(workers: Pool, tmp_path: Path, root: Path, text: Path, task: str) -> None:
    """A run that lost its last four steps makes them again, to the last bit.

    Under CO2 alone: tests/cli/test_resume.py has every method, and tests/cli/test_mesh.py trains
    every task under DistributedDataParallel.
    """
    arguments = (
        *small(task, root, text),
        "method=co2",
        "co2.tau=2",
        "train.steps=7",
        "train.batch_size=4",
        "train.eval_every=3",
        "checkpoint.every=3",
        "checkpoint.keep=3",
        "log.every=1",
    )
    if task == "graph":  # its own takes seconds to be made
        arguments = (*arguments, f"data.path={random_graph.write(tmp_path / 'graph').folder}")
    whole = pooled(workers, 2, *arguments, runs=tmp_path / "whole", setup=few_scenes)
    assert whole.status == 0, whole.err
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (summary,) = (tmp_path / "cut").rglob("summary.json")
    summary.unlink()
    for step in (6, 7):
        shutil.rmtree(summary.parent / "checkpoints" / f"step_{step}")
    again = pooled(workers, 2, *arguments, runs=tmp_path / "cut", setup=few_scenes)
    assert again.status == 0 and "resumed at step 3 of 7" in again.out
    assert_same_run(whole.folder, again.folder)
    losses = [line["loss"] for line in metrics(whole.folder, "train")]
    assert len(losses) == len(set(losses)) == 7
    finals = json.loads((whole.folder / "summary.json").read_text())["final"]
    assert next(iter(finals)) == "loss"


def test_loading_ahead_changes_nothing(tmp_path: Path) -> None:
    """Processes that make batches change neither weights nor figures; and they end with the run."""
    arguments = (
        "task=resnet50",
        "launch.workers=1",
        "train.steps=6",
        "train.batch_size=4",
        "log.every=1",
        "co2.tau=2",
    )
    folders = []
    for ahead in (0, 1):
        runs = tmp_path / str(ahead)
        run = cli(*arguments, f"data.workers={ahead}", runs=runs)
        assert run.status == 0, run.err
        folders.append(run_folder(configured(*arguments, runs=runs)))
    assert_same_run(*folders)
