"""One replica needs no process group, and trains as one of a group of one."""

import dataclasses

import pytest
import torch.distributed as dist

from tests.grids import grid
from tests.methods.driver import SETTINGS, Session, assert_same, trajectory
from tests.methods.test_resume import stop_everywhere
from tests.workers import Pool


@pytest.mark.parametrize("name", SETTINGS)
def test_no_process_group(workers: Pool, name: str) -> None:
    assert not dist.is_initialized()
    [expected] = workers.run(trajectory, 1, name, SETTINGS[name])
    assert_same(trajectory(0, 1, name, SETTINGS[name]), expected)
    assert not dist.is_initialized()


@pytest.mark.parametrize("name", SETTINGS)
def test_consensus_and_stats(name: str) -> None:
    session = Session(0, name, SETTINGS[name])
    for _ in range(7):
        session.step()
        before = session.snapshot()
        with session.method.consensus():
            if session.steps_done % 3:  # amid a round
                assert_same(session.snapshot(), before)
        assert_same(session.snapshot(), before)
        stats = session.method.stats()
        assert stats.bytes_sent == 0
        assert all(type(value) is float for value in dataclasses.astuple(stats)[:3])
        assert all(type(value) is float for value in stats.own.values())
    session.method.flush()


@pytest.mark.parametrize("name", grid(SETTINGS, ("co2",).__contains__))
def test_resume(name: str) -> None:
    stop_everywhere(0, 1, name, SETTINGS[name])
