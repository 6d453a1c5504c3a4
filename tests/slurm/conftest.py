"""Fixtures of the tests on a SLURM of one's own."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import nobody_started_us, spawned
from tests.slurm.controller import Slurm, missing, running

__all__ = ["nobody_started_us", "slurm", "spawned"]


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A controller and a node. Skips where SLURM is not installed."""
    if missing():
        pytest.skip(f"SLURM is not here: no {', '.join(missing())} (slurm-wlm, munge)")
    # Not pytest's folder: the path of munge's socket would be too long.
    place = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with running(place) as started:
            yield started
    finally:
        shutil.rmtree(place, ignore_errors=True)
