"""Fixtures of the end-to-end tests."""

import fcntl
import functools
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

import train
from co2.record.folder import run_folder
from tests.cli.harness import STORY, Run, command, configured, execute, lay_traps, small, spied
from tests.server import LAUNCHER_VARIABLES, environment
from tests.tasks.conftest import story


@pytest.fixture(autouse=True)
def nobody_started_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under srun or torchrun these tests would take themselves for workers."""
    for name in list(os.environ):
        if name in LAUNCHER_VARIABLES or name.startswith(("SLURM_", "WANDB_")):
            monkeypatch.delenv(name)


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets variables of the environment: `variables(RANK="0", WORLD_SIZE="2")`."""

    def set_all(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text; to tokenize the embedded corpus takes ten seconds of processor time."""
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text(story(40_000))
    return path


@pytest.fixture(scope="session")
def spawned(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The undisturbed run of `STORY`, by an interpreter of its own and the two that it starts, in a
    folder with traps.

    Its processes are counted: see `spied`. pytest's own processes share one such run.
    """
    place = tmp_path_factory.getbasetemp()
    place = place.parent if "PYTEST_XDIST_WORKER" in os.environ else place
    kept, runs = place / "spawned.pickle", place / "spawned" / "runs"
    with (place / "spawned.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            lay_traps(runs.parent)
            spy = environment(**spied(runs.parent / "spy"))
            words = command(*STORY, "data.workers=1", runs=runs)
            kept.write_bytes(pickle.dumps(execute(words, runs, spy)))
    ended: Run = pickle.loads(kept.read_bytes())
    return ended


@pytest.fixture(scope="session")
def finished(
    tmp_path_factory: pytest.TempPathFactory, root: Path, text: Path
) -> Callable[[str], Path]:
    """The folder of a finished run of a task: two steps of one worker. Each is trained once."""
    base = tmp_path_factory.mktemp("finished")

    @functools.cache
    def of(task: str) -> Path:
        few = ("train.steps=2", "train.batch_size=4", "train.eval_every=100", "launch.workers=1")
        words = (*small(task, root, text), "method=allreduce", "log.wandb=disabled", *few)
        config = configured(*words, runs=base / "runs")
        train.APP.work(config)
        return run_folder(config)

    return of
