"""Peer: what the adapters to other people's implementations have in common."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from co2.comm.collectives import consensus, replicate
from co2.comm.mesh import Mesh
from co2.config import CommConfig


class Peer:
    """A published implementation as a Method. It blocks, after every τ inner steps.

    What a peer does in its call cannot be told apart from outside, so exposed_s is all the time
    between the inner optimizer's last step of a round and the next round: waiting for the others,
    copying, the collectives, the outer step. (Ours count waiting alone.) comm_s is the same.
    Bytes are computed by formula. A subclass sets:

    - `Config`, a dataclass with `tau`;
    - `package`, the module that must be there;
    - `copies`, which for a peer includes what it holds only while it synchronizes;
    - `begin()`, which makes the peer's own objects and returns the module to train;
    - `advance()`, one inner step and what the peer does after it;
    - `bytes_per_round()`.
    """

    Config: Any
    package: str
    model: nn.Module
    optimizer: Optimizer
    mesh: Mesh
    averages_gradients = False
    refused_strategies: Mapping[str, str] = MappingProxyType({})
    lr_at: Callable[[int], float] | None = None

    def __init__(self, config: Any = None, comm: CommConfig | None = None) -> None:
        self.config = self.Config() if config is None else config
        self.steps = 0
        self.exposed_s = 0.0

    def begin(self) -> nn.Module:
        raise NotImplementedError

    def advance(self) -> None:
        raise NotImplementedError

    def bytes_per_round(self) -> float:
        """Bytes that one worker sends in one round."""
        raise NotImplementedError

    @property
    def copies(self) -> float:
        raise NotImplementedError

    def prepare(self, model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> nn.Module:
        self.model, self.optimizer, self.mesh = model, optimizer, mesh
        self.group = mesh.new_group_across_replicas()
        replicate(model, self.group)
        optimizer.register_step_post_hook(self._start_clock)  # a peer's own hooks come after it
        return self.begin()

    def step(self) -> None:
        self.advance()
        self.steps += 1
        if self.steps % self.config.tau == 0:
            self.exposed_s += time.perf_counter() - self._inner_step_ended

    def consensus(self) -> AbstractContextManager[None]:
        return consensus(self.model, self.group, None)

    def flush(self) -> None:
        """Nothing is in flight after a step."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "exposed_s": self.exposed_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.exposed_s = state["steps"], state["exposed_s"]

    def stats(self) -> dict[str, float]:
        sent = self.bytes_per_round() * (self.steps // self.config.tau)
        return {"comm_s": self.exposed_s, "exposed_s": self.exposed_s, "bytes": sent}

    def notices(self) -> list[str]:
        return []

    @property
    def scratch_bytes(self) -> int:
        return 0

    @property
    def state_device(self) -> torch.device:
        return self.mesh.device

    @property
    def lag(self) -> int:
        return self.config.tau

    def ring_bytes(self, payload: int) -> float:
        """Bytes that one worker sends when a ring reduces so many: 2(G−1)/G of them."""
        return 2 * (self.mesh.num_replicas - 1) * payload / self.mesh.num_replicas

    def _start_clock(self, *_: Any) -> None:
        self._inner_step_ended = time.perf_counter()
