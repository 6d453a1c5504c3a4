"""Fixtures for every test."""

from collections.abc import Iterator

import pytest
import torch

from tests.workers import Pool


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models run faster on one thread, and the workers have one each."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def workers() -> Iterator[Pool]:
    """Four gloo workers: `workers.run(fn, world, *args)` calls `fn(rank, world, *args)`."""
    pool = Pool(4)
    yield pool
    pool.close()
