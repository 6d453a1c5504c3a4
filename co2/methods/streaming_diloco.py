"""Streaming DiLoCo (Douillard et al., 2025, arXiv 2501.18512). Overlapped for `delay` steps.

    layer l belongs to fragment l mod P; for fragment p, on every replica i:
        its syncs: steps n ≡ ⌈(p + 1) τ/P⌉  (mod τ), counted from 1
        `delay` steps before a sync:  start d = mean_i (θ − x^i)        x^i: local weights then
        at the sync, with d arrived:  v ← β v + d                       (outer_step.py, nesterov)
                                      θ ← θ − α (d + β v)
                                      x^i ← (1 − mix) θ + mix x^i       x^i: local weights now

τ → `tau`, P → `fragments`, delay → `delay`, mix → `mixing` (the share of the local weights),
α → `outer_lr`, β → `outer_momentum`. θ, the fragment's outer weights, is equal on all replicas.
With two fragments and τ = 6, fragment 0 syncs after steps 3, 9, 15 and fragment 1 after 6, 12,
whatever the delay. A sync before step 1 + delay does nothing, because no collective was started.

A layer is a sequence of consecutive trained parameters, in the model's order, that share the module
path up to and including its first number: all of `transformer.h.3`, for example. A parameter that
is in no numbered container is a layer of its own. Every fragment needs at least one layer.

With `exchange` int8 or int4 the θ − x^i are quantized, with one scale for each parameter tensor,
and so is their mean. Rounding errors are kept and added the next time (compressed_mean.py). d is
then the quantized mean, equal on all replicas.

The consensus is always the mean of the x^i. The share 1 − mix of the steps made while d was under
way is not late but given up, and whatever else was trained is in the x^i.

Chosen here: the offsets if P does not divide τ, rounded up, so that no two fragments have a sync
in the same step; and uniform quantization with error feedback, where the paper sends floats of 4
bits.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from co2.comm.codec import BITS
from co2.comm.compressed_mean import CompressedMean
from co2.errors import require
from co2.limits import Amount, Count, Decay, Limited, Share, Steps
from co2.methods.base import BF16, ELASTIC, OTHERS, QUORUM, Method, synchronizing
from co2.methods.shared.fragments import Fragment
from co2.methods.shared.outer_step import nesterov


class StreamingDiLoCo(Method):
    may_change = frozenset({"mixing", "outer_lr", "outer_momentum"})

    @dataclass
    class Config(Limited):
        tau: Count = 12
        """Inner steps between two syncs of the same fragment. The paper: 30 to 100."""
        fragments: Count = 2
        """P, at most τ and at most the number of layers. The paper: 3 layers in each fragment."""
        delay: Steps | None = 1
        """Inner steps that a collective may take without anybody waiting; below τ. null: τ/P, from
        the sync of the fragment before; with P = 1 τ − 1."""
        mixing: Share = 0.5
        """Share of the local weights in the weights after a sync. The paper: 0.5."""
        exchange: Literal["full", "int8", "int4"] = "full"
        """How differences travel: full, or quantized to int8 or int4, with error feedback."""
        outer_lr: Amount = 0.7
        """α, the outer learning rate."""
        outer_momentum: Decay = 0.9
        """β, the outer momentum."""

        def __post_init__(self) -> None:
            super().__post_init__()
            hint = f"must be at most tau, which is {self.tau}"
            require(self.fragments <= self.tau, "fragments", self.fragments, hint)
            hint = f"must be below tau, which is {self.tau}"
            require(self.delay is None or self.delay < self.tau, "delay", self.delay, hint)

    def refusals(self) -> dict[str, str]:
        kind = self.config.exchange
        behind = "its fragments meet amid the round, when a slow replica is behind; use null"
        found = {QUORUM: behind}
        if kind != "full":
            reason = f"exchange={kind} has rounding errors that a newcomer lacks; use full"
            found |= {ELASTIC: reason, OTHERS: reason}
            found[BF16] = f"exchange={kind} is less already; use fp32"
            reason = f"exchange={kind} has scales of whole tensors, not of parts; use full"
            found |= {"mesh.strategy=zero2": reason, "mesh.strategy=zero3": reason}
        return found

    def set_up(self) -> nn.Module:
        parts = strided(self.model, self.optimizer, self.config.fragments)
        self.fragments = [Streamed(self, number, part) for number, part in enumerate(parts)]
        return self.model

    def update(self) -> None:
        self.inner_step()
        now = self.steps % self.config.tau
        starting = [fragment for fragment in self.fragments if fragment.starts_at == now]
        syncing = [fragment for fragment in self.fragments if fragment.syncs_at == now]
        if starting or syncing:
            with synchronizing():
                for fragment in starting:
                    fragment.start()
                for fragment in syncing:
                    fragment.sync()

    def scratch_tensors(self) -> list[Tensor]:
        vectors = (fragment.flat.transfer for fragment in self.fragments)
        return [tensor for transfer in vectors for tensor in transfer.scratch_tensors()]

    def first_means(self) -> dict[str, int]:
        return {f"fragment {n}": one.first_sync for n, one in enumerate(self.fragments)}

    @property
    def round_steps(self) -> int:
        return self.config.tau


class Streamed(Fragment):
    """Some of the layers, synchronized by a DiLoCo of their own."""

    def __init__(self, method: StreamingDiLoCo, number: int, params: list[Tensor]) -> None:
        super().__init__(method, f"{number}.", params)
        self.config = config = method.config
        self.exchange: CompressedMean | None = None
        if config.exchange != "full":
            sizes = [param.numel() for param in self.flat.params]
            bits = BITS[config.exchange]
            self.exchange = exchange = CompressedMean(sizes, method.mesh, self.mean, bits)
            for name, tensor in exchange.state_tensors().items():
                saved = name not in exchange.messages()
                self.hold(name, tensor, saved=saved)
        self.outer = self.hold("outer", self.flat.copy(), replicated=True)
        self.momentum = self.hold("momentum", self.flat.zeros(), replicated=True)
        tau, fragments = config.tau, config.fragments
        self.syncs_at = sync_step(number, tau, fragments)
        apart = (self.syncs_at - sync_step(number - 1, tau, fragments)) % tau or tau
        self.delay = min(apart, tau - 1) if config.delay is None else config.delay
        self.starts_at = (self.syncs_at - self.delay) % tau

    def start(self) -> None:
        """Start the mean of θ − x^i."""
        with self.flat.round():
            self.flat.displacement(self.outer, out=self.mean.buffer)
        if self.exchange is None:
            self.mean.start()
        else:
            self.exchange.start(self.mean.buffer)

    def sync(self) -> None:
        """Take the mean that was started `delay` steps before, and do the outer step."""
        mean = self.mean.wait()
        if mean is None:  # its start would have been before the first step
            return
        alpha, beta = self.config.outer_lr, self.config.outer_momentum
        with self.flat.round():
            for chunk in self.flat.chunks:
                outer, x = chunk.of(self.outer), chunk.read()
                nesterov(outer, chunk.of(self.momentum), chunk.of(mean), alpha, beta)
                chunk.write(x.lerp_(outer, 1 - self.config.mixing))

    @property
    def first_sync(self) -> int:
        """The first step with a sync whose collective was started at step 1 or later."""
        first = self.syncs_at or self.config.tau
        return first if first > self.delay else first + self.config.tau


def sync_step(number: int, tau: int, fragments: int) -> int:
    """Return the steps after which a fragment has its syncs, modulo τ. No two fragments share one,
    because they are τ/P ≥ 1 apart before they are rounded."""
    return -(-(number + 1) * tau // fragments) % tau


def strided(model: nn.Module, optimizer: Optimizer, fragments: int) -> list[list[Tensor]]:
    """Return the trained parameters of each fragment; layer l is in fragment l mod `fragments`.

    Raises:
        ConfigError: the model has fewer layers than fragments.
    """
    groups: Iterable[dict[str, Any]] = optimizer.param_groups
    trained = {id(p) for group in groups for p in group["params"] if p.requires_grad}
    named = [(name, p) for name, p in model.named_parameters() if id(p) in trained]
    assert len(named) == len(trained), (
        "the optimizer trains a parameter that the model does not have"
    )
    layers = [[p for _, p in same] for _, same in groupby(named, key=lambda item: layer(item[0]))]
    hint = f"must be at most {len(layers)}, the layers that this model has"
    require(fragments <= len(layers), "streaming_diloco.fragments", fragments, hint)
    return [[p for one in layers[number::fragments] for p in one] for number in range(fragments)]


def layer(name: str) -> str:
    """Return what the names of one layer's parameters have in common: `h.3.attn.bias` → `h.3`."""
    parts = name.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: numbered + 1])
