"""consensus() shows the replicas' mean, and leaves no trace."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed

import co2
from co2.comm import collectives
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


@pytest.mark.parametrize("name", SETTINGS)
def test_consensus(workers: Pool, name: str) -> None:
    world = 3
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
    alike = name in ("allreduce", "acco", "onebit_adam")
    for key in ("norm.running_mean", "drift", *([] if alike else ["scale"])):
        assert not torch.equal(inside[key], before[key])


def out_of_reach(rank: int, world: int, name: str) -> tuple[list, list]:
    """As seen under a group that takes the tensors where they lie, and under one that does not."""
    usual = looked_at(rank, world, name)
    with (
        patch.object(collectives, "carries", lambda group, tensor: False),
        patch.object(torch.Tensor, "cpu", lambda tensor: tensor.clone()),
    ):
        return usual, looked_at(rank, world, name)


@pytest.mark.parametrize("name", ["local_sgd"])
def test_a_group_that_cannot_reach_a_gpu_gets_a_copy(workers: Pool, name: str) -> None:
    """And what it makes of the copy comes back: in the broadcast at the start, and in the mean."""
    for usual, copied in workers.run(out_of_reach, 2, name):
        assert_same(copied, usual)


def test_gloo_is_for_the_memory_of_the_host(workers: Pool) -> None:
    workers.run(carried, 2)


def carried(rank: int, world: int) -> None:
    group = co2.Mesh.world().new_group_across_replicas()
    gpu, host = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)
    assert not collectives.carries(group, gpu)  # type: ignore[arg-type]
    assert collectives.carries(group, host)  # type: ignore[arg-type]
    assert collectives.carries(None, gpu)  # type: ignore[arg-type]
    with patch("torch.distributed.get_backend_config", lambda group: "cpu:gloo,cuda:nccl"):
        assert collectives.carries(group, gpu)  # type: ignore[arg-type]
    torch.distributed.barrier(group)  # who leaves early breaks what the other still connects


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
