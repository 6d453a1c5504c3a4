"""What must be equal on all replicas is, and a replica that differs is named."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import co2
import train
from co2.config import Config
from co2.errors import ReplicasDiffer
from co2.methods.shared.local_method import BlockingMethod
from co2.start import launch
from tests.cli.harness import configured
from tests.grids import grid
from tests.methods.driver import SETTINGS, Session
from tests.workers import Pool

STEPS = 7
"""Two rounds and a step, so that something has arrived everywhere."""
UNCHECKED = {"onebit_adam": {"m", "v"}, "zero_one_adam": {"m", "v", "u", "anchor"}}
"""Equal after this many steps, and not always: what signs have brought."""


def with_threads(rank: int, world: int) -> tuple[Tensor, Tensor, float]:
    """CO2 on a worker of 1 + rank threads, whose elements' operations round alike."""
    torch.set_num_threads(1 + rank)
    try:
        weight = torch.nn.Parameter(torch.zeros(300_001))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        method = co2.CO2(co2.CO2.Config(tau=1))
        method.prepare(torch.nn.ParameterList([weight]), optimizer, co2.Mesh.world())
        for step in range(20):
            generator = torch.Generator().manual_seed(100 * step + rank)
            weight.grad = torch.randn(len(weight), generator=generator)
            method.step()
        with method.consensus():
            pass
        method.flush()
        return method.anchor, method.momentum.vector, method.gap.value.item()
    finally:
        torch.set_num_threads(1)


def test_replicas_may_have_other_numbers_of_threads(workers: Pool) -> None:
    (anchor, momentum, gap), other = workers.run(with_threads, 2)
    assert torch.equal(anchor, other[0])
    assert torch.equal(momentum, other[1])
    assert 1 < gap == other[2], "the norm was of use"


def held(
    rank: int, world: int, name: str, settings: dict[str, Any]
) -> tuple[dict[str, Tensor], set[str]]:
    """Vectors by name, without what is only sent; and which of them are said to be equal on all
    replicas."""
    session = Session(rank, name, settings, dtype=torch.float32)
    for _ in range(STEPS):
        session.step()
    saved, replicated = session.method.saved_tensors(), session.method.replicated_tensors()
    session.method.flush()
    vectors = {key: tensor for key, tensor in (saved | replicated).items() if tensor.dim()}
    return vectors, set(replicated)


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_equal_is_said_to_be(workers: Pool, name: str) -> None:
    (first, said), *others = workers.run(held, 3, name, SETTINGS[name])
    equal = {
        key for key, one in first.items() if all(torch.equal(one, its[key]) for its, _ in others)
    }
    assert said <= equal and equal - said == UNCHECKED.get(name, set())


def test_a_shard_is_equal_to_no_other(workers: Pool) -> None:
    [(_, said)] = workers.run(held, 1, "co2", {**SETTINGS["co2"], "shard": True})
    assert not said


def corrupted(rank: int, world: int, name: str, who: int) -> None:
    """In each tensor in turn the last bit of one element, which is put back."""
    session = Session(rank, name, SETTINGS[name], dtype=torch.float32)
    for _ in range(STEPS):
        session.step()
    for key, tensor in session.method.replicated_tensors().items():
        with session.method.consensus():
            pass
        before = session.snapshot()
        bits = tensor.view(torch.int32)
        bits[-1] ^= int(rank == who)
        usual = 1 if who == 0 else 0
        text = f"{key} of replica {who} differs from that of replica {usual},"
        with pytest.raises(ReplicasDiffer, match=text), session.method.consensus():
            pytest.fail("nothing may be shown")
        bits[-1] ^= int(rank == who)
        after = session.snapshot()
        assert all(torch.equal(after[one], before[one]) for one in before)
    session.method.flush()


@pytest.mark.parametrize("name", grid(SETTINGS, ("diloco", "co2", "streaming_diloco").__contains__))
def test_the_replica_that_differs_is_named(workers: Pool, name: str) -> None:
    workers.run(corrupted, 3, name, 1)


@pytest.mark.parametrize(("world", "who"), [(3, 0), (2, 1)])
def test_it_may_be_any(workers: Pool, world: int, who: int) -> None:
    workers.run(corrupted, world, "local_sgd", who)


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
