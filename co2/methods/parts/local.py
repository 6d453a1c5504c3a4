"""LocalMethod: what the methods with τ local steps have in common.

A method of this kind holds vectors of the model's size, and says what happens when a round ends.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.profiler import record_function

from co2.comm.background import BackgroundMean
from co2.comm.collectives import consensus, replicate
from co2.comm.flat import FlatParams
from co2.comm.mesh import Mesh
from co2.comm.phases import OUTER_STEP
from co2.config import CommConfig
from co2.errors import require, require_number
from co2.methods.parts.auto_tau import AUTO, AutoTau


class LocalMethod:
    """τ inner steps on every replica, then `end_round`. A subclass sets:

    - `Config`, a dataclass with `tau`, and for a blocking method with `comm_share`;
    - `held`, the model copies that it keeps beyond the communication buffer;
    - `vectors`, the names of its flat tensors, which make up its state;
    - `begin()`, which allocates them, and `end_round()`.
    """

    Config: Any
    held: float
    vectors: tuple[str, ...] = ()
    averages_gradients = False
    refused_strategies: Mapping[str, str] = MappingProxyType({})
    rounds_apart = 1
    """Rounds that one replica may run ahead of another: 2 where means arrive one round late."""
    lr_at: Callable[[int], float] | None = None
    """See Method."""

    def __init__(self, config: Any = None, comm: CommConfig | None = None) -> None:
        self.config = self.Config() if config is None else config
        self.comm = comm or CommConfig()
        self.steps = self.round_began = 0

    def begin(self) -> None:
        raise NotImplementedError

    def end_round(self) -> None:
        raise NotImplementedError

    def prepare(self, model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> nn.Module:
        self.model, self.optimizer = model, optimizer
        self.group, self.replica_group = (
            mesh.new_group_across_replicas(),
            mesh.new_group_within_replica(),
        )
        replicate(model, self.group)
        self.flat = FlatParams(optimizer, self.comm.device, mesh=mesh)
        self.mean = self.new_mean(mesh)
        self.auto: AutoTau | None = None
        if self.config.tau == AUTO:
            self.auto = AutoTau(mesh, getattr(self.config, "comm_share", None))
        self.begin()
        return model

    def new_mean(self, mesh: Mesh) -> BackgroundMean:
        """The communication buffer."""
        flat = self.flat
        return BackgroundMean(flat.numel, mesh, self.comm, dtype=flat.dtype, device=flat.device)

    @property
    def tau(self) -> int:
        """Inner steps of the round under way; while one ends, of the next."""
        return self.config.tau if self.auto is None else self.auto.tau

    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1
        if self.auto is not None:
            self.auto.step_ends()
        if self.steps - self.round_began == self.tau:
            self.round_began = self.steps
            if self.auto is not None:
                self.auto.round_ends(self.mean.clocks())
            with torch.no_grad(), record_function(OUTER_STEP), self.flat.round():
                self.end_round()
        if self.auto is not None:
            self.auto.step_begins()

    def lr(self, group: int) -> float:
        """γ_t: the inner learning rate of a parameter group at the round's last inner step."""
        return float(self.optimizer.param_groups[group]["lr"])

    def consensus(self) -> AbstractContextManager[None]:
        return consensus(self.model, self.group, self.replica_group)

    def flush(self) -> None:
        self.mean.close()
        if self.auto is not None:
            self.auto.close()

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "round_began": self.round_began,
            "mean": self.mean.state_dict(),
            "vectors": {name: getattr(self, name) for name in self.vectors},
            "auto": self.auto and self.auto.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.round_began = state["steps"], state["round_began"]
        if self.auto is not None:
            self.auto.load_state_dict(state["auto"])
        self.mean.load_state_dict(state["mean"])
        for name in self.vectors:
            getattr(self, name).copy_(state["vectors"][name])

    def stats(self) -> dict[str, float]:
        chosen = {} if self.auto is None else {"tau": float(self.auto.tau)}
        return {**self.mean.clocks(), **chosen}

    def notices(self) -> list[str]:
        if self.auto is None:
            return []
        notices, self.auto.notices = self.auto.notices, []
        return notices

    @property
    def copies(self) -> float:
        return self.held + self.mean.buffer.element_size() / self.flat.dtype.itemsize

    @property
    def scratch_bytes(self) -> int:
        return self.flat.transfer.scratch_bytes

    @property
    def state_device(self) -> torch.device:
        return self.flat.device

    @property
    def lag(self) -> int:
        return self.rounds_apart * self.tau


def check_tau(tau: int | str) -> None:
    """Raise `ConfigError` unless τ is a whole number of 1 or more, or auto."""
    whole = isinstance(tau, int) and not isinstance(tau, bool) and tau >= 1
    require(whole or tau == AUTO, "tau", tau, "must be a whole number, 1 or more, or auto")


def check_comm_share(share: float) -> None:
    """Raise `ConfigError` unless 0 < share < 1."""
    require(0 < share < 1, "comm_share", share, "must be above 0 and below 1")


def check_outer(outer_lr: float, outer_momentum: float) -> None:
    """Raise `ConfigError` unless α ≥ 0 is finite and 0 ≤ β < 1."""
    require_number("outer_lr", outer_lr, 0.0, "must be a finite number, 0 or more")
    check_share("outer_momentum", outer_momentum)


def check_share(key: str, value: float) -> None:
    """Raise `ConfigError` unless the value lies in [0, 1)."""
    require(0 <= value < 1, key, value, "must be at least 0 and below 1")
