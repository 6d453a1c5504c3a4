"""Fixtures for every test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.workers import TASK_LIBRARIES, Pool


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
def workers(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Four gloo workers: `workers.run(fn, world, *args)` calls `fn(rank, world, *args)`.

    A test that also takes `root` trains a real model on a corpus. Where the session has such tests,
    the libraries of these models are imported once, before the workers are forked.
    """
    real = {"workers", "root"}
    needed = any(real <= set(getattr(item, "fixturenames", ())) for item in request.session.items)
    pool = Pool(4, TASK_LIBRARIES if needed else ())
    yield pool
    pool.close()
