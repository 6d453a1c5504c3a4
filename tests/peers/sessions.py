"""Training loops of one replica under a peer or under one of our methods, for pool workers."""

from typing import Any

import torch
from torch import Tensor

import co2
from co2.peers import known_methods
from tests.methods import problem

KNOWN = known_methods()


def trajectory(
    rank: int,
    world: int,
    name: str,
    settings: dict[str, Any],
    optimizer: str,
    dtype: torch.dtype,
) -> list[dict[str, Tensor]]:
    """The replica after 0, 1, …, 15 steps. Ranks differ in initial weights and in data."""
    net, inner = problem.build(rank, optimizer, dtype)
    method = KNOWN[name](KNOWN[name].Config(**settings))
    model = method.prepare(net, inner, co2.Mesh.world())
    history = [problem.snapshot(net)]
    for step in range(15):
        problem.set_lr(inner, step)
        problem.backward(model, step, rank)
        method.step()
        inner.zero_grad()
        history.append(problem.snapshot(net))
    method.flush()
    return history


def progress(
    rank: int, world: int, name: str, settings: dict[str, Any], gradient: float | None = None
) -> list[tuple[Tensor, Tensor]]:
    """(start − end) of every round on this replica, and what the next one starts from.

    SGD with rate 1/τ; gradients do not depend on the weights: `gradient`, or random ones.
    """
    tau = settings["tau"]
    weight = torch.nn.Parameter(torch.zeros(5))
    inner = torch.optim.SGD([weight], lr=1 / tau)
    method = KNOWN[name](KNOWN[name].Config(**settings))
    method.prepare(torch.nn.ParameterList([weight]), inner, co2.Mesh.world())
    generator = torch.Generator().manual_seed(rank)
    rounds = []
    for _ in range(4):
        moved = torch.zeros(5)
        for _ in range(tau):
            given = torch.randn(5, generator=generator)
            weight.grad = given if gradient is None else torch.full((5,), gradient)
            moved += weight.grad / tau
            method.step()
        rounds.append((moved, weight.detach().clone()))
    method.flush()
    return rounds
