"""Training loops of one replica under a peer or under one of our methods, for pool workers."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import co2
from co2.comm import clocks
from co2_measure.peers import known_methods
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


def exposed_by_the_clock(rank: int, world: int) -> float:
    """Exposed seconds of two rounds in which a mean takes 5, and an inner step and a copy 100."""
    now = 0.0

    def taking(seconds: float, act: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            now += seconds
            return act(*args, **kwargs)

        return call

    net, inner = problem.build(rank, "sgd", torch.float32)
    method = KNOWN["torch_post_local_sgd"](KNOWN["torch_post_local_sgd"].Config(tau=2))
    method.prepare(net, inner, co2.Mesh.world())
    inner.register_step_post_hook(taking(100, lambda *_: None))
    with (
        patch.object(clocks.time, "perf_counter", lambda: now),
        patch.object(dist, "all_reduce", taking(5, dist.all_reduce)),
        patch.object(torch, "cat", taking(100, torch.cat)),
    ):
        for step in range(4):
            problem.backward(net, step, rank)
            method.step()
    return method.stats().exposed_s
