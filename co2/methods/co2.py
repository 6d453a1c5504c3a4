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
"""

from dataclasses import dataclass
from typing import Any

from co2.methods.local import LocalMethod, check_outer, check_tau
from co2.outer import GapPenalty, Momentum, check_clip, check_gap_penalty


class CO2(LocalMethod):
    held = 2  # anchor, momentum
    vectors = ("anchor",)
    rounds_apart = 2

    @dataclass
    class Config:
        tau: int | str = 12
        """Inner steps of a round, or auto (tau.py). The paper searches 1, 3, 6, 12, 24, …, 192."""
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

        def __post_init__(self) -> None:
            check_tau(self.tau)
            check_outer(self.outer_lr, self.outer_momentum)
            check_gap_penalty(self.gap_penalty)
            check_clip(self.clip, self.clip_mode)

    def begin(self) -> None:
        config = self.config
        self.anchor = self.flat.copy()
        self.gap = GapPenalty(config.gap_penalty, self.flat, config.outer_lr)
        self.momentum = Momentum(self.flat, config.outer_momentum, config.clip, config.clip_mode)

    def end_round(self) -> None:
        lr = max(self.lr(group) for group in range(len(self.optimizer.param_groups)))
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
