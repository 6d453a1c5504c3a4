"""consensus() shows the replicas' mean, and leaves no trace."""

import pytest
import torch

from tests.methods.collectives import SlowNetwork
from tests.methods.driver import OVERLAPPED, SETTINGS, Session, Snapshot, assert_same, trajectory
from tests.workers import Pool

TAU = 3
STEPS = 3 * TAU


class Raised(Exception):
    pass


def looked_at(rank: int, world: int, name: str) -> list[tuple[Snapshot, Snapshot, Snapshot]]:
    """Before, inside and after a consensus, at the start and after each step."""
    session = Session(rank, name, SETTINGS[name])
    history = []
    for step in range(STEPS + 1):
        if step:
            session.step()
        before = session.snapshot()
        with session.method.consensus():
            inside = session.snapshot()
        history.append((before, inside, session.snapshot()))
    return history


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_consensus(workers: Pool, name: str, world: int) -> None:
    runs = workers.run(looked_at, world, name)
    undisturbed = workers.run(trajectory, world, name, SETTINGS[name], None, torch.float64, STEPS)
    for rank, run in enumerate(runs):
        assert_same([before for before, _, _ in run], undisturbed[rank])
        assert_same([after for _, _, after in run], undisturbed[rank])
        for step, (before, inside, _) in enumerate(run):
            for key, value in inside.items():
                if not value.is_floating_point():
                    assert_same(value, before[key])
                    continue
                mean = torch.stack([other[step][0][key] for other in runs]).mean(dim=0)
                torch.testing.assert_close(value, mean, rtol=1e-12, atol=1e-12)
    before, inside, _ = runs[1][STEPS - 1]  # where the replicas differ, or nothing is shown
    alike = name in ("allreduce", "onebit_adam")
    for key in ("norm.running_mean", "drift", *([] if alike else ["scale"])):
        assert not torch.equal(inside[key], before[key])


def raising(rank: int, world: int, name: str) -> None:
    session = Session(rank, name, SETTINGS[name])
    for _ in range(TAU + 1):
        session.step()
    before = session.snapshot()
    with pytest.raises(Raised), session.method.consensus():
        raise Raised
    assert_same(session.snapshot(), before)


@pytest.mark.parametrize("name", ["co2", "allreduce"])
def test_an_error_inside_is_no_harm(workers: Pool, name: str) -> None:
    workers.run(raising, 2, name)


def impatient(rank: int, world: int, name: str) -> None:
    session = Session(rank, name, SETTINGS[name])
    with SlowNetwork(lambda n: TAU) as network:
        for _ in range(2 * TAU + 1):
            session.step()
        assert not network.works[-1].is_completed()
        with session.method.consensus():
            pass
        assert not network.works[-1].is_completed(), "the consensus waited for it"
        before = session.snapshot()
        session.method.flush()
        assert all(work.is_completed() for work in network.works)
        assert_same(session.snapshot(), before)
        session.method.flush()


@pytest.mark.parametrize("name", OVERLAPPED)
def test_consensus_does_not_wait_and_flush_does(workers: Pool, name: str) -> None:
    workers.run(impatient, 2, name)
