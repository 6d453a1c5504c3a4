"""The sbatch files, Hydra's launcher and the recipes', on a real controller.

`make test-slow` runs it first, in one process and so with one controller. A start of train.py costs
seconds, so that a job here lives through several things.
"""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from co2.record.folder import run_folder
from recipes.__main__ import run
from recipes.recipe import Column, Recipe, Row
from tests.cli.harness import (
    ANNOUNCED,
    ROOT,
    STORY,
    TOY,
    Run,
    assert_same_run,
    command,
    folder_of,
    folders,
    last_step,
    metrics,
    saved_steps,
    story,
    until,
    weights,
)
from tests.recipes import job_workers
from tests.slurm.controller import LIMIT_S, NODES, Job, Slurm

pytestmark = pytest.mark.slow

GLOO = ("task=toy", "launch.backend=gloo")
SLOW = ("toy.delay_s=0.1", "checkpoint.every=0")
"""Six seconds of training, and no other checkpoints than those of being told to stop."""


@pytest.fixture
def train(slurm: Slurm, tmp_path: Path) -> Callable[..., tuple[Job, Path]]:
    """Submit `STORY` with more of sbatch's options (`--…`) and overrides: the job, its folder."""

    def submit(*words: str) -> tuple[Job, Path]:
        options = [word for word in words if word.startswith("--")]
        overrides = [*STORY, *(word for word in words if not word.startswith("--"))]
        runs = tmp_path / "runs"
        line = (*options, "slurm/train.sbatch", *TOY, f"runs={runs}", *overrides)
        return slurm.sbatch(*line, log=tmp_path / "log"), folder_of(*overrides, runs=runs)

    return submit


def trains(folder: Path, steps: int = 5) -> Callable[[], bool]:
    """Whether a run has come so far."""
    return lambda: last_step(folder) >= steps


def put_back(job: Job, folder: Path, restarts: int) -> int:
    """Wait until a job that was told to stop waits in the queue; the step it has saved."""
    job.until(lambda: job.waits_for_start(restarts))
    assert not (folder / "summary.json").exists()
    step = saved_steps(folder)[-1]
    assert step < 60 and last_step(folder) == step, "nothing is trained and not saved"
    assert job.said.count("put back into the queue") == restarts
    return step


def resumed_at(job: Job) -> list[int]:
    return [int(step) for step in re.findall(r"^resumed at step (\d+)", job.said, re.MULTILINE)]


def test_told_early_and_preempted(train: Callable, spawned: Run) -> None:
    """Told in its first moments, where no training is there to be told, and then preempted, which
    is a SIGTERM, by a job of a partition that comes first: at the end it is as the two workers that
    train.py starts itself and that nothing happened to."""
    job, folder = train(*SLOW)
    job.until(lambda: len(job.tasks()) == 2)
    job.tell("USR1")
    first = put_back(job, folder, 1)
    job.start_now()
    job.until(trains(folder, first + 3))
    high = ("--partition=high", "--nodes=2", "--exclusive", "--wrap=true")
    other = job.slurm.sbatch(*high, log=job.log.with_name("other"))
    assert other.end() == "COMPLETED"
    second = put_back(job, folder, 2)
    assert first < second
    job.start_now()
    assert job.end() == "COMPLETED"
    assert resumed_at(job) == [first, second]
    assert job.said.count("┌") == 1, "only worker 0 speaks"
    assert_same_run(folder, spawned.folder)


def test_dead_tasks_and_nodes(train: Callable, spawned: Run) -> None:
    """Of a job on two nodes. Where a task dies the job fails, and the same submission goes on;
    where a node dies the controller puts it back, unless it was submitted with --no-requeue."""
    words = ("toy.delay_s=0.1", "checkpoint.every=4", "--nodes=2", "--ntasks-per-node=1")
    job, folder = train(*words)
    job.until(lambda: saved_steps(folder) != [])
    os.kill(job.tasks()["1"], signal.SIGKILL)
    assert job.end() == "FAILED"
    assert job.shown["ExitCode"] == "137:0" and job.shown["Restarts"] == "0"
    assert not (folder / "summary.json").exists()
    first = saved_steps(folder)[-1]

    job, _ = train(*words)
    options = (f"--nodelist={NODES[1]}", "--no-requeue", "--wrap=sleep 60")
    beside = job.slurm.sbatch(*options, log=job.log.with_name("beside"))
    job.until(lambda: saved_steps(folder)[-1] > first)
    update = ("scontrol", "update", f"nodename={NODES[1]}")
    job.slurm.call(*update, "state=down", "reason=test")
    job.until(lambda: job.waits_for_start(1))
    assert beside.end() == "NODE_FAIL"
    job.until(lambda: not job.processes())
    assert not (folder / "summary.json").exists()
    second = saved_steps(folder)[-1]
    job.slurm.call(*update, "state=resume")
    job.start_now()
    assert job.end() == "COMPLETED"
    assert resumed_at(job) == [first, second]
    assert "put back" not in job.said, "that was the controller"
    told, whole = ([line["step"] for line in story(f)] for f in (folder, spawned.folder))
    assert told == whole
    # Alone on its node a worker takes every core of this machine, and so rounds otherwise.
    torch.testing.assert_close(weights(folder), weights(spawned.folder))


def test_time_limit_and_refusals(train: Callable, slurm: Slurm, tmp_path: Path) -> None:
    """The sbatch file's own signal comes when 300 seconds are left, here at once, but the
    controller looks twice a minute; meanwhile, what cannot be run. One task, which starts the two
    workers and hands the signal on."""
    words = ("toy.delay_s=0.6", "checkpoint.every=0", "--ntasks-per-node=1", "--time=5")
    job, folder = train(*words)
    elsewhere = (f"--chdir={tmp_path}", "slurm/train.sbatch")
    wrong = ("--ntasks-per-node=1", "slurm/train.sbatch", *TOY, "co2.tua=3")
    for options, status, line in (
        (elsewhere, "2:0", "error: submit from the repository's root, where train.py is"),
        (wrong, "2:0", "error: co2.tua=3: unknown key; did you mean co2.tau?"),
    ):
        refused = slurm.sbatch(*options, log=tmp_path / "refused")
        assert refused.end() == "FAILED" and refused.shown["ExitCode"] == status
        said = [line for line in refused.said.splitlines() if not line.startswith("srun: ")]
        assert said[-1] == line
    put_back(job, folder, 1)
    job.cancel()


def test_sweep(slurm: Slurm, tmp_path: Path) -> None:
    """Each task of an array is one combination. One is not disturbed; one is told to stop and put
    back, it alone; one is cancelled, saves and is not put back, though the SIGTERM ends W&B's own
    process too; one that has no combination fails."""
    runs = tmp_path / "runs"
    base = ("method=co2", "train.steps=60", *SLOW, "launch.workers=1")
    base += ("log.every=1", "log.wandb=offline")
    words = (*GLOO, f"runs={runs}", *base, "co2.tau=1,3,6")
    options = ("--array=0-3", "--ntasks-per-node=1", "slurm/sweep.sbatch")
    number = slurm.sbatch(*options, *words, log=tmp_path / "log-%a").number
    jobs = [Job(slurm, f"{number}_{index}", tmp_path / f"log-{index}") for index in range(4)]
    whole, told, cancelled, none = jobs
    places = [folder_of(*base, f"co2.tau={tau}", runs=runs) for tau in (1, 3, 6)]

    told.until(trains(places[1]))
    told.tell("USR1")
    cancelled.until(trains(places[2]))
    cancelled.cancel()
    assert none.end() == "FAILED" and none.shown["ExitCode"] == "2:0"
    why = "error: SLURM_ARRAY_TASK_ID=3: the sweep has the jobs 0 to 2:"
    assert none.said.startswith(f"{ANNOUNCED}{why}")
    put_back(told, places[1], 1)
    told.cancel()
    assert cancelled.end() == "CANCELLED" and "put back" not in cancelled.said
    (step,) = saved_steps(places[2])
    assert last_step(places[2]) == step
    assert whole.end() == "COMPLETED"
    assert [job.shown["Restarts"] for job in jobs] == ["0", "1", "0", "0"]
    assert [(place / "summary.json").exists() for place in places] == [True, False, False]
    assert set(folders(runs)) == set(places)


@pytest.mark.skipif(find_spec("submitit") is None, reason="needs the extra: .[slurm]")
def test_submitted_by_hydra(slurm: Slurm, tmp_path: Path, spawned: Run) -> None:
    """A job that is told to stop goes on, and the command waits for it."""
    runs, limit = tmp_path / "runs", "hydra.launcher.timeout_min=9"
    folder = folder_of(*STORY, *SLOW, runs=runs)
    words = command("-m", "hydra/launcher=submitit_slurm", limit, *STORY, *SLOW, runs=runs)
    with subprocess.Popen(words, cwd=ROOT, env=slurm.env) as launching:
        try:
            until(trains(folder), launching)
            (place,) = runs.glob(".multirun/submitit/[0-9]*")
            job = Job(slurm, place.name, place / f"{place.name}_0_log.out")
            job.tell("USR1")
            first = put_back(job, folder, 1)
            job.start_now()
            assert job.end() == "COMPLETED"
            assert launching.wait(LIMIT_S) == 0
        finally:
            launching.kill()
    assert resumed_at(job) == [first]
    assert_same_run(folder, spawned.folder)


def test_submitted_by_recipes(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """What is missing is submitted, with as many tasks as it has workers; asked for again it waits
    for the job that trains it."""
    monkeypatch.setattr("recipes.recipe.RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(ROOT)
    for name, value in {**slurm.env, "SBATCH_OUTPUT": str(tmp_path / "log")}.items():
        monkeypatch.setenv(name, value)
    row = Row("CO2", ("method=co2", "launch.workers=1", "train.steps=12"))
    recipe = Recipe("toy", "", "", (row,), (Column("loss", GLOO, "final.loss"),), seeds=(0,))
    (cell,) = (cell for *_, cell in recipe.cells("smoke"))

    def submit() -> list[str]:
        assert run([recipe], "smoke", None, "slurm") == 0
        return re.findall(r"Submitted batch job (\d+)", capfd.readouterr().out)

    (first,), (second,) = submit(), submit()
    waiting = Job(slurm, second, tmp_path / "log")
    assert waiting.shown["JobState"] == "PENDING"
    assert waiting.shown["Dependency"].startswith("singleton")
    waiting.cancel()
    job = Job(slurm, first, tmp_path / "log")
    assert job.end() == "COMPLETED"
    assert job.shown["JobName"] == str(run_folder(cell.config()).relative_to(tmp_path / "runs"))
    assert cell.summary() is not None
    assert submit() == []


def test_worlds_of_one_job(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First the workers of one node, then those of two, make what is of their number."""
    # Interpreters import it as they start: there the small recipe gets its name.
    runs = str(tmp_path / "runs")
    lines = (
        "import recipes.recipe",
        "from recipes.registry import RECIPES",
        "from tests.recipes.job_workers import RECIPE",
        f"recipes.recipe.RUNS = {runs!r}",
        "RECIPES[RECIPE.name] = RECIPE",
    )
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
    monkeypatch.setattr("recipes.recipe.RUNS", runs)
    options = ("--nodes=2", "--ntasks-per-node=2", f"--export=ALL,PYTHONPATH={tmp_path}:{ROOT}")
    words = ("slurm/worlds.sbatch", job_workers.RECIPE.name, "--seeds", "0", "--dirty")
    job = slurm.sbatch(*options, *words, log=tmp_path / "log")
    assert job.end() == "COMPLETED", job.said
    told = re.findall(r"(\d of \d by \d workers): ", job.said)
    assert told == [f"{run} of 3 by {workers} workers" for workers in (2, 4) for run in (1, 2, 3)]
    cells = [cell for *_, cell in job_workers.RECIPE.cells("smoke", seeds=[0])]
    assert all((cell.summary() is None) == ("launch.workers=1" in cell.overrides) for cell in cells)


def test_an_elastic_run_loses_a_node(slurm: Slurm, tmp_path: Path) -> None:
    """Everything on a node dies: the other trains on. The controller puts that part back, and it
    joins. Told to stop, both parts are put back and go on together."""
    runs, steps = tmp_path / "runs", 60
    words = ("method=co2", "co2.tau=3", f"train.steps={steps}", "train.eval_every=30")
    words += ("log.every=1", "toy.delay_s=1", "checkpoint.every=0", "launch.workers=1")
    words += ("launch.silent_s=20",)
    limit_s = 5 * LIMIT_S  # five interpreters start
    options = ("--array=0-1", "--exclusive", "slurm/elastic.sbatch")
    line = (*options, *TOY, f"runs={runs}", *words)
    number = slurm.sbatch(*line, log=tmp_path / "log-%a").number
    first, second = (Job(slurm, f"{number}_{i}", tmp_path / f"log-{i}") for i in range(2))
    folder = folder_of("launch.elastic=true", *words, runs=runs)

    second.until(trains(folder), limit_s)
    node = second.shown["NodeList"]
    assert node != first.shown["NodeList"]
    for pid in (*second.steps(), *second.processes()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    slurm.call("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    first.until(lambda: metrics(folder, "members") != [])
    (lost,) = metrics(folder, "members")
    assert len(lost["lost"]) == len(lost["members"]) == 1
    second.until(lambda: second.waits_for_start(1))
    slurm.call("scontrol", "update", f"nodename={node}", "state=resume")
    second.start_now()
    first.until(lambda: len(metrics(folder, "members")) == 2, limit_s)
    joined = metrics(folder, "members")[-1]
    assert joined["joined"] == [2] and len(joined["members"]) == 2

    second.tell("USR1")
    first.until(lambda: first.waits_for_start(1) and second.waits_for_start(2))
    for job in (first, second):
        assert job.said.count("put back into the queue") == 1, "the other time by the controller"
        job.start_now()
    first.until(trains(folder, steps), limit_s)
    assert [first.end(), second.end()] == ["COMPLETED"] * 2
    assert "the run has ended with status 0" in first.said
    assert [line["step"] for line in metrics(folder, "train")] == list(range(1, steps + 1))


def test_ones_own_loop_on_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.sbatch("examples/slurm.sbatch", log=tmp_path / "log")
    assert job.end() == "COMPLETED", job.said
    (loss,) = re.findall(r"last loss ([\d.]+)", job.said)
    assert float(loss) < 1.0
