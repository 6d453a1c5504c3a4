"""Peers do what their names say: held against our methods, closed forms, and a simulation."""

from typing import Any

import pytest
import torch

from tests.peers.sessions import progress, trajectory
from tests.workers import Pool

DILOCO: dict[str, Any] = {"tau": 4, "outer_lr": 0.7, "outer_momentum": 0.9}


@pytest.mark.parametrize("optimizer", ["plain", "sgd", "adamw"])
@pytest.mark.parametrize("world", [2, 3])
def test_torch_post_local_sgd_is_local_sgd(workers: Pool, world: int, optimizer: str) -> None:
    given = ({"tau": 3}, optimizer, torch.float64)
    theirs = workers.run(trajectory, world, "torch_post_local_sgd", *given)
    ours = workers.run(trajectory, world, "local_sgd", *given)
    torch.testing.assert_close(theirs, ours, rtol=1e-11, atol=1e-11)


def test_torch_post_local_sgd_of_one_step(workers: Pool) -> None:
    given = ({"tau": 1}, "sgd", torch.float64)
    theirs = workers.run(trajectory, 2, "torch_post_local_sgd", *given)
    ours = workers.run(trajectory, 2, "local_sgd", *given)
    torch.testing.assert_close(theirs, ours, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("world", [2, 3])
def test_fairscale_slowmo_is_slowmo(workers: Pool, world: int) -> None:
    pytest.importorskip("fairscale")
    given = ({"tau": 3, "outer_lr": 0.9, "outer_momentum": 0.6}, "sgd", torch.float32)
    theirs = workers.run(trajectory, world, "fairscale_slowmo", *given)
    ours = workers.run(trajectory, world, "slowmo", *given)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


def test_torchft_diloco_closed_form(workers: Pool) -> None:
    """Every replica moves by −1 a round."""
    pytest.importorskip("torchft")
    for rounds in workers.run(progress, 2, "torchft_diloco", DILOCO, 1.0):
        starts = torch.stack([start[0] for _, start in rounds])
        torch.testing.assert_close(starts, torch.tensor([-1.33, -3.227, -5.6343, -8.50087]))


@pytest.mark.parametrize("beta", [0.9, 0.0])
def test_torchft_diloco_is_the_papers(workers: Pool, beta: float) -> None:
    """v = βv + d; x ← x − α(d + βv), for d the mean of what three replicas moved by."""
    pytest.importorskip("torchft")
    replicas = workers.run(progress, 3, "torchft_diloco", {**DILOCO, "outer_momentum": beta})
    x = v = torch.zeros(5)
    for rounds in zip(*replicas, strict=True):
        d = torch.stack([moved for moved, _ in rounds]).mean(0)
        v = beta * v + d
        x = x - 0.7 * (d + beta * v)
        for _, start in rounds:
            torch.testing.assert_close(start, x)
