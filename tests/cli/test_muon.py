"""optim.name=muon in whole runs: under every local method, with several workers, resumed."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import co2
from co2.config import OptimConfig, Optimizer
from co2.errors import PREEMPTED
from co2.methods import METHODS
from tasks.shared.optimizer import make_optimizer
from tests.cli.harness import assert_same_run, assert_same_weights, metrics, pooled, stopped_after
from tests.grids import OF_A_KIND, grid
from tests.methods.driver import overrides
from tests.workers import Pool

MUON = ("optim.name=muon", "optim.lr=0.02")
REFUSE = ("acco", "desloc", "mt_dao", "demo", "onebit_adam", "zero_one_adam")
LOCAL = [name for name in METHODS if name not in REFUSE]


@pytest.mark.parametrize("method", grid(LOCAL, OF_A_KIND.__contains__))
def test_learns(workers: Pool, tmp_path: Path, method: str) -> None:
    """Under every method that has an inner optimizer."""
    words = (f"method={method}", *overrides(method), *MUON)
    run = pooled(workers, 2, *words, runs=tmp_path)
    assert run.status == 0, run.err
    *_, last = metrics(run.folder, "eval")
    # To name the most frequent class gives 0.36. SparseLoCo sends a few elements only.
    assert last["accuracy"] > (0.6 if method == "sparseloco" else 0.65)


@pytest.mark.slow  # tests/tasks/test_optimizer.py has its state
@pytest.mark.parametrize("method", ["diloco", "co2"])
def test_goes_on_exactly(workers: Pool, tmp_path: Path, method: str) -> None:
    words = (f"method={method}", *overrides(method), *MUON, "train.steps=24", "train.eval_every=5")
    words = (*words, "log.every=1", "checkpoint.every=0")
    whole = pooled(workers, 2, *words, runs=tmp_path / "whole")
    told = {"setup": stopped_after, "setup_arguments": (11,)}
    run = pooled(workers, 2, *words, runs=tmp_path / "cut", **told)
    assert run.status == PREEMPTED
    run = pooled(workers, 2, *words, runs=tmp_path / "cut")
    assert run.status == 0 and "resumed at step" in run.out
    assert_same_run(run.folder, whole.folder)


def test_a_replica_shares_its_state(workers: Pool, tmp_path: Path) -> None:
    """ZeRO-1 gives whole matrices to one worker or another: the bits of ddp, and exact resume."""
    words = ("method=diloco", "diloco.tau=3", *MUON, "train.steps=16", "mesh.replica_size=2")
    words = (*words, "log.every=1", "checkpoint.every=5")
    whole = pooled(workers, 4, *words, runs=tmp_path / "ddp")
    words, told = (
        (*words, "mesh.strategy=zero1"),
        {"setup": stopped_after, "setup_arguments": (11,)},
    )
    assert pooled(workers, 4, *words, runs=tmp_path / "cut", **told).status == PREEMPTED
    run = pooled(workers, 4, *words, runs=tmp_path / "cut")
    assert run.status == 0 and "resumed at step" in run.out
    assert_same_weights(run.folder, whole.folder)


class Inclined(nn.Module):
    """A loss that is linear in a matrix and a bias: gradients are means of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.bias = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(5))

    def forward(self, samples: Tensor) -> Tensor:
        first, second = samples[:, :24], samples[:, 24:]
        return (first @ self.matrix.flatten() + second @ self.bias).mean()


def trained(rank: int, world: int) -> dict[str, Tensor]:
    model = Inclined()
    optimizer = make_optimizer(model, OptimConfig(name=Optimizer.muon, lr=0.1, weight_decay=0.1))
    method = METHODS["allreduce"](METHODS["allreduce"].Config())
    wrapped = method.prepare(model, optimizer, co2.Mesh.world())
    for step in range(5):
        # Whole numbers, of which fp32 rounds no mean of 8: both sides see the same gradients.
        source = torch.Generator().manual_seed(step)
        samples = torch.randint(-9, 10, (8, 29), generator=source).float()
        wrapped(samples.chunk(world)[rank]).backward()
        method.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def test_two_workers_step_as_one_with_the_joint_batch(workers: Pool) -> None:
    (alone,) = workers.run(trained, 1)
    for worker in workers.run(trained, 2):
        assert all(torch.equal(value, alone[name]) for name, value in worker.items())
    assert not torch.equal(alone["matrix"], torch.ones(6, 4))
