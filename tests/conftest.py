"""Fixtures for every test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.workers import Pool


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models run faster on one thread, and the workers have one each."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data.root that tests share, so that each corpus is tokenized once."""
    base = tmp_path_factory.getbasetemp()
    parallel = "PYTEST_XDIST_WORKER" in os.environ
    return (base.parent if parallel else base) / "data"


@pytest.fixture(scope="session")
def workers() -> Iterator[Pool]:
    """Four gloo workers: `workers.run(fn, world, *args)` calls `fn(rank, world, *args)`."""
    pool = Pool(4)
    yield pool
    pool.close()
