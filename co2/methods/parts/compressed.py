"""CompressedAdam: what the two 1-bit variants of Adam have in common.

Both take the place of the inner Adam: they read its parameter groups (lr, betas, eps, weight decay)
but never call its step. Moments and errors are flat vectors, in the order of FlatParams.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from co2.comm.background import BackgroundMean
from co2.comm.compress import COMPRESSORS
from co2.comm.exchange import CompressedMean
from co2.comm.flat import Chunk, FlatParams
from co2.config import CommConfig, CommDevice, OptimConfig, Precision
from co2.config import Optimizer as OptimizerName
from co2.errors import require, require_count
from co2.methods.base import Method, MethodStats


class CompressedAdam(Method):
    """Adam whose replicas exchange signs. A subclass sets `name`, `Config` with `freeze_step`, and
    `waits`, and implements `step()`; if it holds more than m and v, it makes that in `set_up` and
    names it in `state_tensors`."""

    name: str
    """The method's name in the registry, for error messages."""
    refused_strategies: Mapping[str, str] = MappingProxyType(
        {
            "zero1": "it takes the inner optimizer's place, which has no state to share; use ddp",
            "zero2": "its scales are of whole tensors, not of parts; use ddp",
            "zero3": "its scales are of whole tensors, not of parts; use ddp",
        }
    )

    def __init__(self, config: Any = None, comm: CommConfig | None = None) -> None:
        super().__init__(config, comm)
        dtype, device = self.comm.dtype, self.comm.device
        hint = f"{self.name} sends signs; it needs fp32"
        require(dtype is Precision.fp32, "comm.dtype", dtype.name, hint)
        hint = f"{self.name} updates the model at every step, where it is; use auto"
        require(device is CommDevice.auto, "comm.device", device.name, hint)
        self.rounds = 0
        """How many times the replicas have exchanged anything."""

    @classmethod
    def check(cls, optim: OptimConfig) -> None:
        """Raise `ConfigError` for an inner optimizer whose place this method cannot take."""
        adamw = optim.name is OptimizerName.adamw
        require(adamw, "optim.name", optim.name.name, f"{cls.name} needs adamw")

    def set_up(self) -> nn.Module:
        """Raises `ConfigError` for an optimizer other than plain Adam or AdamW."""
        kind = type(self.optimizer)
        adam = kind in (Adam, AdamW)
        require(adam, "optim.name", kind.__name__, f"{self.name} needs adamw")
        for group in self.optimizer.param_groups:
            plain = not group["amsgrad"] and not group["maximize"]
            hint = f"{self.name} takes no amsgrad and no maximize"
            require(plain, "optim.name", kind.__name__, hint)
        self.flat = flat = FlatParams(self.optimizer)
        self.mean = BackgroundMean(
            flat.numel, self.mesh, self.comm, dtype=flat.dtype, device=flat.device
        )
        sizes = [param.numel() for param in flat.params]
        self.exchange = CompressedMean(sizes, self.mesh, self.mean, COMPRESSORS["sign"])
        self._divisor = flat.transfer.empty(max(chunk.numel for chunk in flat.chunks))
        self.m, self.v = flat.zeros(), flat.zeros()
        return self.model

    def average_gradients(self) -> None:
        """Replace this replica's gradients, in the communication buffer, by the replicas' mean."""
        self.mean.mean_now()
        self.rounds += 1

    def average_signs(self, vector: Tensor) -> None:
        """Replace a vector (numel,) by its 1-bit mean over the replicas, and by 0 where v is 0.

        It travels in units of √v + ε, which all replicas share, so that a sign stands for a step of
        the length that is usual in its tensor. If the vector were sent as it is, an element whose
        √v is a thousandth of the others' would make steps a thousand times too long. The biases of
        keys in GPT-2's attention, whose gradients are nothing but rounding errors, would make the
        training diverge in this way.
        """
        for chunk in self.flat.chunks:
            chunk.of(vector).div_(self._root(chunk))
        self.exchange.start(vector, mask=self.v)
        self.mean.wait()
        for chunk in self.flat.chunks:
            chunk.of(vector).mul_(self._root(chunk))
        self.rounds += 1

    def lr(self, group: int) -> float:
        """Return γ of a parameter group in this step."""
        return float(self.optimizer.param_groups[group]["lr"])

    def betas(self, group: int) -> tuple[float, float]:
        """Return β1 and β2 of a parameter group."""
        first, second = self.optimizer.param_groups[group]["betas"]
        return float(first), float(second)

    def shrinkage(self, group: int) -> float:
        """Return the factor by which AdamW's decoupled weight decay shrinks weights in this step; 1
        for Adam."""
        settings = self.optimizer.param_groups[group]
        return 1 - self.lr(group) * settings["weight_decay"] if _is_decoupled(settings) else 1.0

    def add_l2(self, chunk: Chunk, gradient: Tensor) -> None:
        """Add Adam's weight decay to a gradient, which it is a part of. AdamW: add nothing."""
        settings = self.optimizer.param_groups[chunk.group]
        if settings["weight_decay"] and not _is_decoupled(settings):
            gradient.add_(self.flat.local(chunk), alpha=settings["weight_decay"])

    def divisor(self, chunk: Chunk, correction: float = 1.0) -> Tensor:
        """Return √(v/correction) + ε, in scratch that the next call overwrites; infinity if v = 0.

        An element with v = 0 has had no gradient yet, a token that has not occurred for example. A
        sign cannot stand for 0, and divided by ε alone it would be a huge step. So the element does
        not move and takes no part in exchanges as long as its v is 0.
        """
        still = chunk.of(self.v) == 0
        return self._root(chunk, correction).masked_fill_(still, float("inf"))

    def _root(self, chunk: Chunk, correction: float = 1.0) -> Tensor:
        out = self._divisor[: chunk.numel]
        torch.sqrt(chunk.of(self.v), out=out)
        eps = self.optimizer.param_groups[chunk.group]["eps"]
        return out.div_(correction**0.5).add_(eps)

    def flush(self) -> None:
        self.mean.close()

    def state_tensors(self) -> dict[str, Tensor]:
        """Adam's two moments are among them, because the inner optimizer does not hold them
        here."""
        own = {"m": self.m, "v": self.v, "buffer": self.mean.buffer}
        return {**own, **self.exchange.state_tensors()}

    def saved_tensors(self) -> dict[str, Tensor]:
        """All but the buffer and the messages: nothing is in flight between steps."""
        tensors = self.state_tensors()
        for name in ("buffer", *self.exchange.messages()):
            del tensors[name]
        return tensors

    def scratch_tensors(self) -> list[Tensor]:
        own = [self._divisor, *self.exchange.scratch_tensors()]
        return [*self.flat.transfer.scratch_tensors(), *own]

    def state_dict(self) -> dict[str, Any]:
        own = {"rounds": self.rounds, "mean": self.mean.state_dict()}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.rounds = state["rounds"]
        self.mean.load_state_dict(state["mean"])

    def stats(self) -> MethodStats:
        """`rounds`: how many times the replicas have exchanged anything."""
        return MethodStats.of(self.mean.totals(), {"rounds": float(self.rounds)})


def check_freeze_step(freeze_step: int) -> None:
    """Raise `ConfigError` unless v is refreshed at least once."""
    require_count("freeze_step", freeze_step)


def _is_decoupled(settings: dict[str, Any]) -> bool:
    return bool(settings["decoupled_weight_decay"])
