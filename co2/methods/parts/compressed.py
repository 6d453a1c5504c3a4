"""CompressedAdam: what the two 1-bit variants of Adam have in common.

Both take the inner Adam's place: they read its parameter groups (lr, betas, eps, weight decay) and
never call its step. Moments and errors are flat vectors, in the order of FlatParams.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from co2.comm.background import BackgroundMean
from co2.comm.collectives import consensus, replicate
from co2.comm.compress import COMPRESSORS
from co2.comm.exchange import CompressedMean
from co2.comm.flat import Chunk, FlatParams
from co2.comm.mesh import Mesh
from co2.config import CommConfig, CommDevice, OptimConfig, Precision
from co2.config import Optimizer as OptimizerName
from co2.errors import require, require_count


class CompressedAdam:
    """Adam whose replicas exchange signs. A subclass sets `name`, `Config` with `freeze_step`,
    `vectors` (the names of its flat tensors, all zeros at first) and `step()`."""

    Config: Any
    name: str
    vectors: tuple[str, ...] = ("m", "v")
    m: Tensor
    v: Tensor
    lr_at: Callable[[int], float] | None = None
    averages_gradients = False
    refused_strategies: Mapping[str, str] = MappingProxyType(
        {
            "zero1": "it takes the inner optimizer's place, which has no state to share; use ddp",
            "zero2": "its scales are of whole tensors, not of parts; use ddp",
            "zero3": "its scales are of whole tensors, not of parts; use ddp",
        }
    )
    """See Method."""

    def __init__(self, config: Any = None, comm: CommConfig | None = None) -> None:
        self.config = self.Config() if config is None else config
        self.comm = comm or CommConfig()
        dtype, device = self.comm.dtype, self.comm.device
        hint = f"{self.name} sends signs; it needs fp32"
        require(dtype is Precision.fp32, "comm.dtype", dtype.name, hint)
        hint = f"{self.name} updates the model at every step, where it is; use auto"
        require(device is CommDevice.auto, "comm.device", device.name, hint)
        self.steps = self.rounds = 0

    @classmethod
    def check(cls, optim: OptimConfig) -> None:
        """Raise `ConfigError` for an inner optimizer whose place this method cannot take."""
        adamw = optim.name is OptimizerName.adamw
        require(adamw, "optim.name", optim.name.name, f"{cls.name} needs adamw")

    def step(self) -> None:
        raise NotImplementedError

    def prepare(self, model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> nn.Module:
        """Raises `ConfigError` for an optimizer other than plain Adam or AdamW."""
        kind = type(optimizer).__name__
        require(type(optimizer) in (Adam, AdamW), "optim.name", kind, f"{self.name} needs adamw")
        for group in optimizer.param_groups:
            plain = not group["amsgrad"] and not group["maximize"]
            require(plain, "optim.name", kind, f"{self.name} takes no amsgrad and no maximize")
        self.model, self.optimizer = model, optimizer
        self.group, self.replica_group = (
            mesh.new_group_across_replicas(),
            mesh.new_group_within_replica(),
        )
        replicate(model, self.group)
        self.flat = flat = FlatParams(optimizer)
        self.mean = BackgroundMean(
            flat.numel, mesh, self.comm, dtype=flat.dtype, device=flat.device
        )
        sizes = [param.numel() for param in flat.params]
        self.exchange = CompressedMean(sizes, mesh, self.mean, COMPRESSORS["sign"])
        self._divisor = flat.transfer.empty(max(chunk.numel for chunk in flat.chunks))
        for name in self.vectors:
            setattr(self, name, flat.zeros())
        return model

    def average_gradients(self) -> None:
        """The communication buffer, which holds this replica's, ← the replicas' mean."""
        self.mean.mean_now()
        self.rounds += 1

    def average_signs(self, vector: Tensor) -> None:
        """vector ← its 1-bit mean, and 0 where v is 0.

        It travels in units of √v + ε, which all replicas share. So a sign stands for a step of the
        length that is usual in its tensor. Were the vector sent as it is, an element whose √v is a
        thousandth of the others' would make steps a thousand times too long: the biases of keys in
        GPT-2's attention, whose gradient is rounding and nothing else, end the training that way.
        """
        for chunk in self.flat.chunks:
            chunk.of(vector).div_(self._root(chunk))
        self.exchange.start(vector, mask=self.v)
        self.mean.wait()
        for chunk in self.flat.chunks:
            chunk.of(vector).mul_(self._root(chunk))
        self.rounds += 1

    def lr(self, group: int) -> float:
        return float(self.optimizer.param_groups[group]["lr"])

    def betas(self, group: int) -> tuple[float, float]:
        first, second = self.optimizer.param_groups[group]["betas"]
        return float(first), float(second)

    def shrinkage(self, group: int) -> float:
        """What AdamW's decoupled weight decay multiplies weights by in this step; Adam: 1."""
        settings = self.optimizer.param_groups[group]
        return 1 - self.lr(group) * settings["weight_decay"] if _is_decoupled(settings) else 1.0

    def add_l2(self, chunk: Chunk, gradient: Tensor) -> None:
        """Adam's weight decay, which is a part of the gradient; nothing for AdamW."""
        settings = self.optimizer.param_groups[chunk.group]
        if settings["weight_decay"] and not _is_decoupled(settings):
            gradient.add_(self.flat.local(chunk), alpha=settings["weight_decay"])

    def divisor(self, chunk: Chunk, correction: float = 1.0) -> Tensor:
        """√(v/correction) + ε, in scratch; infinite where v = 0.

        Such an element has had no gradient: a token that has not been seen, say. A sign cannot say
        "nothing", and with ε alone below it the element would fly away. So it stays where it is, as
        long as its v is 0, and takes no part in an exchange.
        """
        still = chunk.of(self.v) == 0
        return self._root(chunk, correction).masked_fill_(still, float("inf"))

    def _root(self, chunk: Chunk, correction: float = 1.0) -> Tensor:
        out = self._divisor[: chunk.numel]
        torch.sqrt(chunk.of(self.v), out=out)
        eps = self.optimizer.param_groups[chunk.group]["eps"]
        return out.div_(correction**0.5).add_(eps)

    def consensus(self) -> AbstractContextManager[None]:
        return consensus(self.model, self.group, self.replica_group)

    def flush(self) -> None:
        self.mean.close()

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "rounds": self.rounds,
            "vectors": {name: getattr(self, name) for name in self.vectors},
            "errors": self.exchange.state_dict(),
            "mean": self.mean.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.rounds = state["steps"], state["rounds"]
        for name in self.vectors:
            getattr(self, name).copy_(state["vectors"][name])
        self.exchange.load_state_dict(state["errors"])
        self.mean.load_state_dict(state["mean"])

    def stats(self) -> dict[str, float]:
        """`rounds`: times that replicas have exchanged anything."""
        return {**self.mean.clocks(), "rounds": float(self.rounds)}

    def notices(self) -> list[str]:
        return []

    @property
    def copies(self) -> float:
        """With Adam's own two moments, which the optimizer does not hold here."""
        held = self.mean.buffer.nbytes + self.exchange.held_bytes
        return len(self.vectors) + held / self.mean.buffer.nbytes

    @property
    def scratch_bytes(self) -> int:
        own = self._divisor.nbytes + self.exchange.scratch_bytes
        return self.flat.transfer.scratch_bytes + own

    @property
    def state_device(self) -> torch.device:
        return self.flat.device

    @property
    def lag(self) -> int:
        return 1


def check_freeze_step(freeze_step: int) -> None:
    """Raise `ConfigError` unless v is refreshed at least once."""
    require_count("freeze_step", freeze_step)


def _is_decoupled(settings: dict[str, Any]) -> bool:
    return bool(settings["decoupled_weight_decay"])
