"""ACCO on the back of an envelope. Everything expected in `CASES` was typed.

The weight starts at `start`; a call's gradient is `slope` times the weight plus the entry for the
replica and the half. With a slope of 0 the pipeline, once it is filled, is plain training.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch.optim import SGD, AdamW

import co2
from co2.config import OptimConfig, Optimizer
from tasks.shared.optimizer import make_optimizer
from tests.methods import problem
from tests.methods.driver import assert_same
from tests.workers import Pool

CALLS = 7


@dataclass
class Case:
    name: str
    halves: list[tuple[float, float]]
    """By replica: the gradients of its first and of its second halves."""
    expected: list[float]
    """The weight after each call: x_0, x̃_1, x_1, x̃_2, x_2, …"""
    start: float = 0.0
    slope: float = 0.0
    lr: tuple[float, ...] = (1.0,) * CALLS
    momentum: float = 0.0


CASES = [
    Case("constant", [(1, 1)], [0, -1, -1, -2, -2, -3, -3]),
    Case("the mean of two halves", [(1, 3)], [0, -1, -2, -3, -4, -5, -6]),
    Case("the mean of two replicas", [(1, 0), (3, 8)], [0, -2, -3, -5, -6, -8, -9]),
    Case("the rate of the call", [(1, 1)], [0, -0.5, -2, -5, -6], lr=(1.0, 0.5, 2.0, 3.0, 4.0)),
    # the buffer is 1, 3/2, 7/4; a step that was not undone would count twice
    Case("momentum", [(1, 1)], [0, -1, -1, -2.5, -2.5, -4.25, -4.25], momentum=0.5),
    # g~ = 10, 5, 3.5, 2.5 at x~ = 8, 3, 1.5, .5; g = 6, 2, .25 at x = 8, 4, 2.25
    Case("gradients are taken where the weights are", [(2, -2)],
         [8, 3, 4, 1.5, 2.25, 0.5, 1.3125], start=8.0, slope=1.0, lr=(0.5,) * CALLS),
]  # fmt: skip


def trained(rank: int, world: int, case: Case) -> list[float]:
    weight = torch.nn.Parameter(torch.full((1,), case.start, dtype=torch.float64))
    optimizer = SGD([weight], lr=1.0, momentum=case.momentum)
    method = co2.ACCO()
    method.prepare(torch.nn.ParameterList([weight]), optimizer, co2.Mesh.world())
    history = []
    for call in range(len(case.expected)):
        optimizer.param_groups[0]["lr"] = case.lr[call]
        weight.grad = case.slope * weight.detach() + case.halves[rank][call % 2]
        method.step()
        optimizer.zero_grad()
        history.append(weight.item())
    method.flush()
    return history


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_by_hand(workers: Pool, case: Case) -> None:
    for history in workers.run(trained, len(case.halves), case):
        assert history == pytest.approx(case.expected, abs=1e-12)


def drifted(rank: int, world: int) -> tuple[list[torch.Tensor], float]:
    """Weights after the calls that end first halves, under AdamW, and its count of steps."""
    model, _ = problem.build_drift([3, 5])
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    method = co2.ACCO()
    method.prepare(model, optimizer, co2.Mesh.world())
    history = []
    for call in range(CALLS):
        problem.backward_drift(model, call, rank)
        method.step()
        if call % 2 == 0:
            history.append(torch.cat([weight.detach().clone() for weight in model.parameters()]))
    method.flush()
    return history, optimizer.state_dict()["state"][0]["step"].item()


def test_gradients_that_ignore_the_weights_make_plain_training(workers: Pool) -> None:
    """With AdamW too: x_t is its t-th step with the means of both halves and all replicas."""
    found = workers.run(drifted, 2)
    model, _ = problem.build_drift([3, 5])
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    weights = list(model.parameters())
    for update in range((CALLS + 1) // 2):
        now = torch.cat([weight.detach() for weight in weights])
        for history, steps in found:
            torch.testing.assert_close(history[update], now)
            assert steps == (CALLS - 1) // 2
        means = [torch.zeros_like(weight) for weight in weights]
        for call, rank in ((2 * update + half, rank) for half in range(2) for rank in range(2)):
            problem.backward_drift(model, call, rank)
            for total, weight in zip(means, weights, strict=True):
                total += weight.grad / 4  # type: ignore[operator]
        for total, weight in zip(means, weights, strict=True):
            weight.grad = total
        optimizer.step()


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_an_estimate_leaves_the_optimizer_as_it_was(name: str) -> None:
    """From the first, which finds no state, on."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
    rate = 0.1 if name == "sgd" else 0.01
    optimizer = make_optimizer(model, OptimConfig(name=Optimizer[name], lr=rate, momentum=0.9))
    method = co2.ACCO()
    method.prepare(model, optimizer, co2.Mesh.world())
    for call in range(CALLS):
        model(torch.randn(3, 4)).square().sum().backward()
        before = copy.deepcopy(optimizer.state_dict())
        weights = [weight.detach().clone() for weight in model.parameters()]
        method.step()
        optimizer.zero_grad()
        if call % 2:
            assert_same(optimizer.state_dict(), before)
            assert not torch.equal(weights[0], next(model.parameters()))
    assert optimizer.state_dict()["state"]
    method.flush()
