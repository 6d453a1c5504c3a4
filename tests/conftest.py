"""Fixtures for every test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.server import PRELOADED, TASK_LIBRARIES
from tests.workers import Pool


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models run fastest on one thread, and each worker of the pool has one thread too."""
    torch.set_num_threads(1)


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
    yield pool
    pool.close()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where tests train real models in the pool's workers, import their libraries once for all.

    Such a test takes both `workers` and `root`, the folder of the corpora.
    """
    names = [set(getattr(item, "fixturenames", ())) for item in session.items]
    if any({"workers", "root"} <= taken for taken in names):
        PRELOADED.extend(TASK_LIBRARIES)
