"""Replicas that differ: what must be equal on all is compared, and the one that differs is named,
as is one that has gone, or makes other calls than the others."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import SGD

import co2
import train
from co2.comm import deadlocks
from co2.config import Config
from co2.errors import ReplicasDiffer, WorkerLost, WrongCall
from co2.methods.shared.local_method import BlockingMethod
from co2.start import launch
from tests.cli.harness import configured
from tests.grids import grid
from tests.methods import problem
from tests.methods.driver import SETTINGS, Session, assert_same, trained
from tests.workers import Pool, everybody, replicas


@contextmanager
def told_of_others(text: str) -> Iterator[None]:
    with pytest.raises(ReplicasDiffer) as caught:
        yield
    assert text in str(caught.value)


# As training begins.

START = "; start all with the same code and settings"


@replicas(2)
@pytest.mark.parametrize(
    ("tau", "width", "text"),
    [
        (5, 1, "local_sgd.tau of replica 1 differs from that of replica 0, and must be equal on "
         "all: 0 has 4, 1 has 5" + START),
        (4, 2, "weight of replica 1 differs from that of replica 0, and must be equal on all: 0 "
         "has (1, 8) of float32, 1 has (2, 8) of float32" + START),
    ],
    ids=["settings", "shapes"],
)  # fmt: skip
def test_replicas_that_differ(rank: int, tau: int, width: int, text: str) -> None:
    net = nn.Linear(8, width if rank else 1)
    with told_of_others(text):
        method = co2.LocalSGD(tau=tau if rank else 4)
        method.prepare(net, SGD(net.parameters(), lr=0.1), co2.Mesh.world())


@replicas(2)
def test_parameters_in_another_order(rank: int) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    params = list(net.parameters())
    optimizer = SGD(params[2:] + params[:2] if rank else params, lr=0.1)
    with told_of_others("trained parameters of group 0 of replica 1 differs"):
        co2.CO2().prepare(net, optimizer, co2.Mesh.world())


# What is held.


@replicas(2)
def test_replicas_may_have_other_numbers_of_threads(rank: int) -> None:
    """CO2 on a worker of 1 + rank threads, whose elements' operations round alike."""
    torch.set_num_threads(1 + rank)
    try:
        weight = nn.Parameter(torch.zeros(300_001))
        method = co2.CO2(co2.CO2.Config(tau=1))
        method.prepare(nn.ParameterList([weight]), SGD([weight], lr=0.1), co2.Mesh.world())
        for step in range(20):
            generator = torch.Generator().manual_seed(100 * step + rank)
            weight.grad = torch.randn(len(weight), generator=generator)
            method.step()
        with method.consensus():
            pass
        method.flush()
        first, second = everybody([method.anchor, method.momentum.vector, method.gap.value])
        assert_same(first, second)
        assert method.gap.value > 1, "the norm was of use"
    finally:
        torch.set_num_threads(1)


@replicas()
@pytest.mark.parametrize(
    ("name", "world", "who"),
    [
        *grid(
            [(name, 3, 1) for name in SETTINGS],
            lambda case: case[0] in ("diloco", "co2", "streaming_diloco"),
        ),
        ("local_sgd", 3, 0),
        ("local_sgd", 2, 1),
    ],
)
def test_the_replica_that_differs_is_named(rank: int, world: int, name: str, who: int) -> None:
    """In each tensor in turn the last bit of one element differs, which is put back."""
    session = trained(name, rank)
    for key, tensor in session.method.replicated_tensors().items():
        session.shown()
        before = session.snapshot()
        bits = tensor.view(torch.int32)
        bits[-1] ^= int(rank == who)
        usual = 1 if who == 0 else 0
        with told_of_others(f"{key} of replica {who} differs from that of replica {usual},"):
            session.shown()
        bits[-1] ^= int(rank == who)
        assert_same(session.snapshot(), before)
    session.method.flush()


def test_a_shard_is_equal_to_no_other() -> None:
    session = Session(0, "co2", {**SETTINGS["co2"], "shard": True})
    assert not session.method.replicated_tensors()


@replicas(2)
def test_rates_that_differ_under_allreduce(rank: int) -> None:
    session = trained("allreduce", rank)
    for group in session.optimizer.param_groups:
        group["lr"] = 0.1 / (1 + rank)
    problem.backward(session.model, 7, rank)
    session.method.step()
    with told_of_others("give all the same learning rates"):
        session.shown()


@contextmanager
def broken_memory() -> Iterator[None]:
    """Setup of a run: worker 1's anchor changes in its second round."""
    original = BlockingMethod.end_round

    def end_round(self: BlockingMethod) -> None:
        original(self)
        if self.mesh.worker == 1 and self.steps == 6:
            self.anchor[3] += 1

    with patch.object(BlockingMethod, "end_round", end_round):
        yield


def ends(rank: int, world: int, config: Config) -> tuple[int, str]:
    err = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(err), broken_memory():
        status = launch._guarded(train.APP.work, config, rank)
    return status, err.getvalue()


def test_a_run_ends_with_one_line(workers: Pool, tmp_path: Path) -> None:
    steps = "train.steps=12", "train.eval_every=3"
    arguments = "method=local_sgd", "local_sgd.tau=3", *steps, "launch.workers=2"
    for status, err in workers.run(ends, 2, configured(*arguments, runs=tmp_path / "runs")):
        assert status == 1
        [line] = err.splitlines()
        assert line.startswith("error: anchor of replica 1 differs from that of replica 0")


# Calls that others do not make.


@replicas(2)
@pytest.mark.parametrize("name", ["acco", "co2", "sparta"])
def test_one_step_more(rank: int, name: str) -> None:
    with told_of_others(
        "steps of replica 1 differs from that of replica 0, and must be equal on all: give every "
        "replica as many batches and steps as the others"
    ):
        trained(name, rank, steps=6 + rank).shown()


@replicas(2)
def test_other_calls(rank: int, tmp_path: Path) -> None:
    session = trained("noloco", rank)
    with told_of_others("every replica must make the same calls in the same order"):
        session.method.save(tmp_path) if rank else session.method.finish()


def unequal(mesh: co2.Mesh, name: str, more: int, alone: bool) -> str:
    """Replica 1 makes more steps before the consensus, or never enters it."""
    deadlocks.LOOK_S = 0.2
    rank = mesh.replica
    try:
        session = trained(name, rank, steps=6 + more * rank)
        if not (alone and rank == 1):
            with session.method.consensus():
                pass
        for _ in range(30):
            session.step()
    except (ReplicasDiffer, WorkerLost, WrongCall) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


ROUNDS = ("local_sgd", "co2", "noloco", "streaming_diloco")
APART = (
    "WrongCall: replica 0 is in consensus(), finish(), save() or resume() after 6 steps, replica 1 "
    "waits for the mean of step"
)


# In processes of their own: what is pending would hold up the end of a process group.
@pytest.mark.parametrize("name", grid(ROUNDS, ("local_sgd",).__contains__))
def test_a_mean_that_others_never_join(name: str) -> None:
    for text in co2.run(unequal, name, 9, False):
        assert text.startswith(APART)
        assert "every replica must make these calls" in text


@pytest.mark.parametrize("name", grid(ROUNDS, ("co2",).__contains__))
def test_a_consensus_that_others_never_enter(name: str) -> None:
    for text in co2.run(unequal, name, 0, True):
        assert text.startswith(APART)


def left_alone(mesh: co2.Mesh) -> str:
    session = trained("local_sgd", mesh.replica, steps=3)
    if mesh.replica == 1:
        os._exit(0)
    try:
        session.method.finish()
    except WorkerLost as error:
        return str(error)
    return "nothing"


def test_a_replica_that_has_gone() -> None:
    """The starter tells of the one that has gone; the other ends at once, too."""
    with pytest.raises(WorkerLost, match="replica 1 was killed, or ended by itself"):
        co2.run(left_alone)


@replicas(2)
def test_who_waits_in_the_consensus_says_so(rank: int) -> None:
    with patch.object(deadlocks, "LOOK_S", 0.1), patch.object(deadlocks, "NOTICE_S", 0.3):
        session = trained("local_sgd", rank, steps=3)
        if rank == 1:
            store = torch.distributed.distributed_c10d._get_default_store()
            store.wait(["told"])
        else:
            said: list[str] = []

            def say(text: str, **_: Any) -> None:
                said.append(text)
                torch.distributed.distributed_c10d._get_default_store().set("told", "")

            with patch.object(deadlocks, "print", say, create=True), session.method.consensus():
                pass
            assert len(said) == 1 and "every replica must" in said[0]
            return
        with session.method.consensus():
            pass
