"""CO2 (Sun et al., ICLR 2024, arXiv 2401.16265). Fully overlapped.

    at the end of round t, on every replica i:
        1  wait for d_{t−1} = mean_i (x_{t−1,0} − x^i_{t−1,τ})     none at t = 0: m_0 = 0
        2  Λ_t, the staleness gap                                  (outer.py, GapPenalty)
        3  start the mean of x_{t,0} − x^i_{t,τ}
        4  m_t = clip(β m_{t−1} + d_{t−1}/Λ_t, φ)                  (outer.py, Momentum)
        5  x_{t+1,0} = x_{t,0} − α m_t                             every replica goes on from here

τ → `tau`, α → `outer_lr`, β → `outer_momentum`, Λ → `gap_penalty`, φ → `clip`.
Chosen here: the exact gap, which the paper derives from Gap-Aware (arXiv 1909.10802) and the
released code replaces by 1; see GapPenalty. Step 4 runs before step 3, because d_{t−1} lies in
the one communication buffer; neither reads what the other writes.

`shard` keeps 1/G of the outer state on each replica: ShardedCO2, below, with the same trajectory.
"""

from dataclasses import dataclass
from typing import Any

import torch

from co2.comm.background import BackgroundMean
from co2.comm.flat import FlatParams
from co2.comm.mesh import Mesh
from co2.config import CommConfig, CommDevice, Precision
from co2.errors import require
from co2.methods.parts.local import LocalMethod, check_outer, check_tau
from co2.methods.parts.outer import GapPenalty, Momentum, check_clip, check_gap_penalty
from co2.methods.parts.outer_shard import Shard


class CO2(LocalMethod):
    held: float = 2  # anchor, momentum
    vectors = ("anchor",)
    rounds_apart = 2

    @dataclass
    class Config:
        tau: int | str = 12
        """Inner steps of a round, or auto (auto_tau.py). The paper tries 1, 3, 6, 12, 24, …,
        192."""
        outer_lr: float = 1.0
        """α."""
        outer_momentum: float = 0.2
        """β. Not published. Smoke GPT-2 (τ = 12, one seed each) did worse with 0.5."""
        gap_penalty: str | float = "gap_aware"
        """gap_aware | gap_aware_elementwise | none, or a constant Λ."""
        clip: float | None = None
        """φ of the outer momentum; null for none."""
        clip_mode: str = "value"
        """value: every element to [−φ, φ]; norm: the whole vector to norm φ."""
        shard: bool = False
        """Anchor and momentum in G parts, one on each replica: 1 + 2/G model copies, not 3."""

        def __post_init__(self) -> None:
            check_tau(self.tau)
            check_outer(self.outer_lr, self.outer_momentum)
            check_gap_penalty(self.gap_penalty)
            check_clip(self.clip, self.clip_mode)

    def __new__(cls, config: Any = None, comm: CommConfig | None = None) -> "CO2":
        """A configuration with `shard` makes a ShardedCO2."""
        sharded = cls is CO2 and config is not None and config.shard
        return super().__new__(ShardedCO2 if sharded else cls)

    def begin(self) -> None:
        self.hold(self.flat)

    def hold(self, flat: FlatParams | Shard) -> None:
        """Make the outer state: of the whole vector, or of a part."""
        config = self.config
        self.anchor = flat.copy()
        self.gap = GapPenalty(config.gap_penalty, flat, config.outer_lr)
        self.momentum = Momentum(flat, config.outer_momentum, config.clip, config.clip_mode)

    def largest_lr(self) -> float:
        """γ_t where parameter groups differ."""
        return max(self.lr(group) for group in range(len(self.optimizer.param_groups)))

    def end_round(self) -> None:
        lr = self.largest_lr()
        self.gap.see(lr)
        arrived = self.mean.wait()  # 1
        if arrived is not None:
            self.gap.update(self.momentum.norm, lr)  # 2
            self.momentum.step(arrived, self.gap)  # 4
        self.flat.displacement(self.anchor, out=self.mean.buffer)  # 3
        self.mean.start()
        for chunk in self.flat.chunks:  # 5
            anchor = chunk.of(self.anchor)
            anchor.sub_(chunk.of(self.momentum.vector), alpha=self.config.outer_lr)
            chunk.write(anchor)

    def state_dict(self) -> dict[str, Any]:
        own = {"gap": self.gap.state_dict(), "momentum": self.momentum.state_dict()}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.gap.load_state_dict(state["gap"])
        self.momentum.load_state_dict(state["momentum"])

    def stats(self) -> dict[str, float]:
        own = {"gap": float(self.gap.value), "clipped": float(self.momentum.clipped)}
        return {**super().stats(), **own}

    @property
    def scratch_bytes(self) -> int:
        return super().scratch_bytes + self.gap.scratch_bytes


class ShardedCO2(CO2):
    """CO2 with its outer state in G parts. Parameters travel, and the whole outer step runs in the
    background: the buffer comes back with what every replica goes on from.

        at the end of round t, on every replica i:
            1  wait for x_{t+1,0}                               in the buffer; x_{1,0} = x_{0,0}
            2  swap: live ← x_{t+1,0}, buffer ← x^i_{t,τ}
            3  start, on 1/G of the vector, to be done when round t+1 ends:
                 mean_i x^i_{t,τ}                                                reduce-scatter
                 d_t = x_{t,0} − mean_i x^i_{t,τ};   x_{t+1,0} = x_{t,0} − α m_t
                 m_{t+1} = clip(β m_t + d_t/Λ_{t+1}, φ)        its norm is summed over the parts
                 x_{t+2,0} = x_{t+1,0} − α m_{t+1}                               all-gather

    The anchor lags: between rounds it is what the round before started from, because d_t needs it,
    and it is moved by the m_t that is still held, to the same bits that were sent.
    Λ_{t+1} is due before γ_{t+1} has come: `lr_at` tells it. Without, γ_t stands for it, which is
    exact for constant rates.
    """

    def __init__(self, config: Any = None, comm: CommConfig | None = None) -> None:
        super().__init__(config, comm)
        hint = "must be fp32 with co2.shard=true: parameters travel, and bf16 loses their changes"
        wire = self.comm.dtype
        require(wire is Precision.fp32, "comm.dtype", wire.name, hint)
        hint = "must be auto with co2.shard=true: parameters and buffer change places in one memory"
        device = self.comm.device
        require(device is CommDevice.auto, "comm.device", device.name, hint)

    def new_mean(self, mesh: Mesh) -> BackgroundMean:
        self.shard = Shard(self.flat, mesh, self.comm)
        return self.shard.mean

    def begin(self) -> None:
        self.flat.copy_to(self.mean.buffer)
        self.mean.in_flight = True  # x_{1,0} = x_{0,0} has arrived already
        self.hold(self.shard)
        self.held = 2 / self.shard.num_replicas
        self.shown = self.figures()

    def end_round(self) -> None:
        self.mean.wait()  # 1
        self.shown = self.figures()
        self.flat.swap(self.mean.buffer)  # 2
        lr = self.largest_lr()
        ahead = lr if self.lr_at is None else self.lr_at(self.steps + self.tau - 1)
        self.gap.see(lr)
        self.gap.see(ahead)
        self.mean.run(lambda: self.outer_step(ahead))  # 3

    @torch.no_grad()
    def outer_step(self, lr: float) -> None:
        """Step 3, with γ_{t+1} = `lr`. In the background: nothing else touches the outer state."""
        shard, alpha = self.shard, self.config.outer_lr
        shard.reduce_scatter()
        for chunk in shard.chunks:
            anchor, mean = chunk.of(self.anchor), chunk.of(shard.own)
            torch.sub(anchor, mean, out=mean)
            anchor.sub_(chunk.of(self.momentum.vector), alpha=alpha)
        self.gap.update(self.momentum.norm, lr)
        self.momentum.step(shard.own, self.gap)
        for chunk in shard.chunks:
            anchor, momentum = chunk.of(self.anchor), chunk.of(self.momentum.vector)
            torch.sub(anchor, momentum, alpha=alpha, out=chunk.of(shard.own))
        shard.all_gather()

    def figures(self) -> torch.Tensor:
        """Λ and the clipped share, (2,), of the newest outer step that is over."""
        return torch.stack((self.gap.value, self.momentum.clipped))

    def state_dict(self) -> dict[str, Any]:
        self.mean.join()  # it changes what is saved
        return {**super().state_dict(), "shown": self.shown}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.shown.copy_(state["shown"])

    def stats(self) -> dict[str, float]:
        gap, clipped = self.shown.tolist()  # of the round that has ended, as without shards
        return {**super().stats(), "gap": gap, "clipped": clipped}

    @property
    def scratch_bytes(self) -> int:
        return super().scratch_bytes + self.shard.scratch_bytes
