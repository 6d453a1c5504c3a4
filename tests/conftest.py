"""Fixtures for every test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.durations import function, read
from tests.server import PRELOADED, TASK_LIBRARIES, server
from tests.workers import Pool

# PyTorch's stores ask a name server who connects, and serve nobody meanwhile. Where it is silent,
# each test with a store of its own would take five seconds longer.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

LONG = read()
"""Test functions that `make test-fast` leaves out: see tests/durations.py."""
SLOW = (
    "tests/cli/test_installed.py",  # builds the wheel, and makes environments
    "tests/cli/test_mesh.py::test_every_task_in_parts",  # real models, four workers
    "tests/cli/test_mesh.py::test_killed",
    # The plan of a large model is traced: 40 s.
    "tests/cli/test_plan.py::test_what_does_not_fit_is_refused_with_what_does[words1",
    "tests/cli/test_stop.py::test_told_before_there_are_workers",  # new interpreters
    "tests/cli/test_runs.py::test_compile",  # a C++ compiler's work
    "tests/cli/test_several_machines.py::test_a_machine_is_lost_and_comes_back[replica]",
    "tests/engine/test_lab.py::test_a_table",  # links of its own, as root
    "tests/methods/test_replicas_of_several_workers.py::test_two_replicas_of_two_workers",
    "tests/recipes/test_golden.py::test_a_small_one",  # trains several tasks
    "tests/tasks/test_fused_experts.py",  # Triton's interpreter
)
"""What `make test` leaves to `make test-slow`, as it does the tests marked where they stand."""


def pytest_configure(config: pytest.Config) -> None:
    """Where several processes test, they have one server, which imports while they collect."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        PRELOADED.extend(TASK_LIBRARIES)
        server().share()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The controller's own clocks take minutes, in which others can run.
    items.sort(key=lambda item: not item.nodeid.startswith("tests/slurm"))
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        if function(item.nodeid) in LONG:
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models run fastest on one thread, and each worker of the pool has one thread too."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """What a test sets in the environment, as `co2` does for the programs that it starts, ends with
    it: else those of a later test would import the suite from elsewhere."""
    before = os.environ.copy()
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `data.root` that all tests share, so that each corpus is tokenized once in a session."""
    base = tmp_path_factory.getbasetemp()
    parallel = "PYTEST_XDIST_WORKER" in os.environ
    return (base.parent if parallel else base) / "data"


@pytest.fixture(scope="session")
def workers() -> Iterator[Pool]:
    """Four gloo workers: `workers.run(fn, world, *args)` calls `fn(rank, world, *args)`."""
    pool = Pool(4)
    pool.start()  # here, so that no test takes longer because it is the first
    yield pool
    pool.close()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where tests train real models in the pool's workers, import their libraries once for all.

    Such a test takes both `workers` and `root`, the folder of the corpora.
    """
    names = [set(getattr(item, "fixturenames", ())) for item in session.items]
    if any({"workers", "root"} <= taken for taken in names):
        PRELOADED.extend(TASK_LIBRARIES)
