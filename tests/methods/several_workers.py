"""A small problem for replicas of several workers: sizes that two workers cannot share evenly, and
one that leaves a worker with nothing. No batch norm, so that two workers with half a batch each
train as one with the whole."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import co2
from co2.config import CommConfig, MeshConfig, Strategy
from co2.methods import METHODS
from co2.train.expert_parallel import clip
from co2.train.within_replica import Replica, accumulating, checkpoint_activations, whole_weights
from tasks.moe.experts import Experts
from tests.methods import driver
from tests.methods.driver import ROUNDS_OF

DENSE = tuple(strategy for strategy in Strategy if strategy is not Strategy.ep)
"""Strategies of models without experts."""
SAMPLES = 4
"""Of one worker in one step."""
TAU = 3
RATES = (0.3, 0.6, 0.9, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "allreduce": ("allreduce", {}),
    "local_sgd": ("local_sgd", {"tau": TAU}),
    "slowmo": ("slowmo", {"tau": TAU, "outer_momentum": 0.6}),
    "diloco": ("diloco", {"tau": TAU, "outer_momentum": 0.6}),
    "overlap_local_sgd": ("overlap_local_sgd", {"tau": TAU}),
    "co2_released": ("co2_released", {"tau": TAU}),
    "cocod_sgd": ("cocod_sgd", {"tau": TAU}),
    "eager_diloco": ("eager_diloco", {"tau": TAU, "outer_momentum": 0.5}),
    "streaming_diloco": ("streaming_diloco", {"tau": TAU, "outer_momentum": 0.4}),
    "co2": ("co2", {"tau": TAU, "outer_momentum": 0.5, "clip": 0.02}),
    "co2 by norm": (
        "co2",
        {"tau": TAU, "outer_momentum": 0.5, "clip": 0.1, "clip_mode": "norm"},
    ),
    "co2 by element": (
        "co2",
        {"tau": TAU, "outer_momentum": 0.5, "gap_penalty": "gap_aware_elementwise"},
    ),
    "co2 in parts": ("co2", {"tau": TAU, "outer_momentum": 0.5, "clip": 0.02, "shard": True}),
    "co2_keep": (
        "co2_keep",
        {"tau": TAU, "delay": 1, "keep_local": 0.6, "outer_momentum": 0.6, "momentum_weight": 0.3},
    ),
    "sparseloco": ("sparseloco", {"tau": TAU, "density": 0.4}),
    "noloco": ("noloco", {"tau": TAU}),
    "acco": ("acco", {}),
    "sparta": ("sparta", {"share": 0.4, "delay": 1}),
    "sparta of all": ("sparta", {"share": 1.0, "delay": 1}),
    "desloc": ("desloc", {"tau": TAU, "first_moment_every": 2, "second_moment_every": 4}),
    "mt_dao": (
        "mt_dao",
        {"tau": TAU, "first_moment_every": TAU, "second_moment_every": 4, "late_momentum": True},
    ),
    "demo": ("demo", {"top_k": 4, "block": 4}),
    "co2_keep with moments": ("co2_keep", {"tau": TAU, "delay": 1, "average_moments": True}),
}
SETTINGS |= {name: (name, driver.SETTINGS[name]) for name in ROUNDS_OF if name not in SETTINGS}
NEED_ADAM = ("desloc", "mt_dao", "co2_keep with moments")

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda groups: SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "plain": lambda groups: SGD(groups, lr=0.1),
    "adamw": lambda groups: AdamW(groups, lr=0.02, weight_decay=0.1),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("drift", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.drift.mul_(0.5).add_(x.mean())
        return x + torch.tanh(self.dropout(self.linear(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 7, experts: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(5, width)
        self.experts = Experts(width, 5, 4, 2, None, True, (0.5, 0.5), 0.0) if experts else None
        self.h = nn.ModuleList(Block(width) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1) + torch.randn(1) / 10)  # one worker has none of it
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.leave = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x)) + self.frozen
        for block in self.h:
            x = block(x)
        x = x if self.experts is None else x + self.experts(x)
        return self.scale * self.leave(x)


class Tiny(nn.Module):
    """Of which one worker of two has nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.leave = nn.ModuleList(), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(x)


class Worker:
    """One worker of a replica under a method. Ranks differ in initial weights and in data."""

    def __init__(
        self,
        rank: int,
        kind: str,
        strategy: Strategy,
        size: int,
        optimizer: str = "sgd",
        dtype: torch.dtype = torch.float64,
        accumulate: int = 1,
        recompute: bool = False,
        clip_norm: float | None = None,
        dropout: float = 0.0,
        width: int = 7,
        tiny: bool = False,
        experts: bool = False,
    ) -> None:
        name, settings = SETTINGS[kind]
        self.mesh = co2.Mesh.world(size)
        self.accumulate, self.clip_norm, self.steps = accumulate, clip_norm, 0
        torch.manual_seed(rank)
        self.net: Any = (Tiny() if tiny else Net(width, experts)).to(dtype)
        for block in self.net.h:
            block.dropout.p = dropout
        if recompute:
            checkpoint_activations(self.net)
        self.method = METHODS[name](METHODS[name].Config(**settings), CommConfig())
        self.replica = Replica(
            MeshConfig(size, strategy), self.mesh, self.method.averages_gradients
        )
        self.replica.shard(self.net)
        weights = dict(self.net.named_parameters())
        groups = [
            {"params": [p for n, p in weights.items() if n.startswith("h.")]},
            {"params": [p for n, p in weights.items() if not n.startswith("h.")]},
        ]
        self.optimizer = self.replica.optimizer(OPTIMIZERS[optimizer](groups))
        prepared = self.method.prepare(
            self.net, self.optimizer, self.mesh, schedule=lambda step: max(self.rates(step))
        )
        self.model = self.replica.wrap(prepared, CommConfig())

    def rates(self, step: int) -> tuple[float, float]:
        peak = 0.1 if "nesterov" in self.optimizer.param_groups[0] else 0.02
        factor = RATES[min(step, len(RATES) - 1)]
        return peak * factor, 0.3 * peak

    def step(self, halves: int = 1, zero_grad: bool = True) -> float:
        """Train on this worker's samples, or on those that `halves` workers would have had."""
        for group, rate in zip(self.optimizer.param_groups, self.rates(self.steps), strict=True):
            group["lr"] = rate
        first = self.mesh.worker * halves
        data = [samples(self.steps, first + part) for part in range(halves)]
        x, y = (torch.cat(parts).to(self.net.leave.bias.dtype) for parts in zip(*data, strict=True))
        loss = 0.0
        pieces = zip(x.chunk(self.accumulate), y.chunk(self.accumulate), strict=True)
        for micro, (inputs, targets) in enumerate(pieces):
            with accumulating(self.model, last=micro == self.accumulate - 1):
                part = (self.model(inputs) - targets).square().mean() / self.accumulate
                part.backward()
            loss += part.item()
        if self.clip_norm is not None:
            clip(self.net, self.clip_norm, self.replica.experts)
        self.method.step()
        if zero_grad:
            self.optimizer.zero_grad()
        self.steps += 1
        return loss

    def whole(self) -> dict[str, Tensor]:
        """Parameters of the replica, copied."""
        buffers = dict(self.net.named_buffers())
        weights = whole_weights(self.net, self.replica.experts)
        return {n: v.detach().clone() for n, v in weights.items() if n not in buffers}


def samples(step: int, worker: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + worker)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
