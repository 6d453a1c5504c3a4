"""Every task under every method: it composes; it trains, stops and goes on exactly."""

import json
import shutil
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import train
from co2.app.compose import plain
from co2.app.schema import typed
from co2.methods import METHODS
from co2.peers import known_methods
from co2.record.folder import run_folder
from tasks import TASKS
from tests.cli.harness import ROOT, assert_same_run, cli, configured, metrics, pooled
from tests.workers import Pool

SCALES = ("smoke", "gpu", "paper")
SMALL: dict[str, tuple[str, ...]] = {
    "toy": (),
    "resnet50": (),
    "vit": ("vit.image_size=16", "vit.eval_resize=16"),
    "ade20k": (),
    "shapenet": ("shapenet.eval_samples=32", "shapenet.svm_samples=64"),
    "gpt2": ("gpt2.eval_samples=8", "gpt2.context=32"),
    "roberta": ("roberta.eval_samples=8",),
    "transnormer": ("transnormer.eval_samples=8", "transnormer.context=32"),
}
"""What makes 20 steps and an evaluation quick; the smoke recipe is the rest."""


def scales_of(task: str) -> list[str]:
    folder = ROOT / "conf" / "task" / "scale"
    return [scale for scale in SCALES if (folder / f"{task}_{scale}.yaml").exists()]


def test_no_task_is_forgotten() -> None:
    assert SMALL.keys() == TASKS.keys()
    assert {path.stem for path in (ROOT / "conf" / "task").glob("*.yaml")} == TASKS.keys()
    assert {path.stem for path in (ROOT / "conf" / "method").glob("*.yaml")} == set(known_methods())
    for task in TASKS.keys() - {"toy"}:
        assert scales_of(task) == list(SCALES), task


@pytest.mark.parametrize("task", TASKS)
def test_composes_with_every_method_at_every_scale(task: str) -> None:
    with initialize_config_dir(config_dir=str(train.APP.conf), version_base="1.3"):
        for scale in scales_of(task):
            for method in METHODS:
                choice = [f"task={task}", f"method={method}", f"scale={scale}"]
                config = typed(plain(compose("config", choice)), METHODS, TASKS)
                assert (config.task, config.method, config.scale) == (task, method, scale)
                made = train.APP.make_task(config)
                assert made.units_per_sample >= 1 and made.unit in ("tokens", "samples")


@pytest.mark.parametrize("method", ["allreduce", "co2"])
@pytest.mark.parametrize("task", TASKS)
def test_goes_on_exactly(workers: Pool, tmp_path: Path, root: Path, task: str, method: str) -> None:
    """A run that lost its last ten steps makes them again, to the last bit."""
    arguments = (
        f"task={task}",
        f"method={method}",
        *(["co2.tau=3"] if method == "co2" else []),
        "train.steps=20",
        "train.batch_size=4",
        "train.eval_every=10",
        "checkpoint.every=10",
        "log.every=1",
        f"data.root={root}",
        *SMALL[task],
    )
    whole = pooled(workers, 2, *arguments, runs=tmp_path / "whole")
    assert whole.status == 0, whole.err
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (summary,) = (tmp_path / "cut").rglob("summary.json")
    summary.unlink()
    shutil.rmtree(summary.parent / "checkpoints" / "step_20")
    again = pooled(workers, 2, *arguments, runs=tmp_path / "cut")
    assert again.status == 0 and "resumed at step 10 of 20" in again.out
    assert_same_run(whole.folder, again.folder)
    losses = [line["loss"] for line in metrics(whole.folder, "train")]
    assert len(losses) == 20 and len(set(losses)) > 10
    finals = json.loads((whole.folder / "summary.json").read_text())["final"]
    assert next(iter(finals)) == "loss"


def test_loading_ahead_changes_nothing(tmp_path: Path) -> None:
    """Processes that make batches change neither weights nor figures; and they end with the run."""
    arguments = (
        "task=resnet50",
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
