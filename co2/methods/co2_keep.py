"""CO2 with kept progress: ours, unpublished; CoCoD-SGD with SlowMo's momentum. Fully overlapped.

    at the end of round t, on every replica i:
        p^i_t = x^i_{t,τ} − x^i_{t,0}                               own progress
        δ_{t−1} = mean_i p^i_{t−1} arrives                          none at t = 0
        u_t = clip(β u_{t−1} + δ_{t−1}/Λ_t, φ)                      (outer.py, Momentum)
        x^i_{t+1,0} = x^i_{t,τ} + (δ_{t−1} − p^i_{t−1}) + w u_t     u_0 = 0, p^i_{−1} = δ_{−1} = 0
        start the mean of p^i_t

τ → `tau`, β → `outer_momentum`, w → `injection`, Λ → `gap_penalty`, φ → `clip`.
CO2's rounds restart from a consensus that misses the round just trained. Here local progress is
kept, everybody's mean replaces the own round of before, and the momentum of what is known is
added: it needs the round before only, so it waits for nothing. With w = β the replicas' mean moves
as in SlowMo (α = 1) wherever gradients are the same at replica and mean; w = 0 is CoCoD-SGD.
As in every method here −p travels, the pseudo-gradient, and `momentum` holds −u. Λ takes w u for
the movement made while the mean was under way. Why p is subtracted as it was, and not as it
travelled: see cocod_sgd.py.
"""

from dataclasses import dataclass
from typing import Any

from co2.errors import require_number
from co2.methods.local import LocalMethod, check_share, check_tau
from co2.outer import GapPenalty, Momentum, check_clip, check_gap_penalty


class CO2Keep(LocalMethod):
    held = 3  # the round's start, −p of the last round, momentum
    vectors = ("start", "last")
    rounds_apart = 2

    @dataclass
    class Config:
        tau: int | str = 12
        """Inner steps of a round, or auto (tau.py)."""
        outer_momentum: float = 0.9
        """β."""
        injection: float = 0.3
        """w."""
        gap_penalty: str | float = "none"
        """none | gap_aware | gap_aware_elementwise, or a constant Λ."""
        clip: float | None = None
        """φ of the outer momentum; null for none."""
        clip_mode: str = "value"
        """value: every element to [−φ, φ]; norm: the whole vector to norm φ."""

        def __post_init__(self) -> None:
            check_tau(self.tau)
            check_share("outer_momentum", self.outer_momentum)
            mend = "must be a finite number, 0 or more"
            require_number("injection", self.injection, 0.0, mend)
            check_gap_penalty(self.gap_penalty)
            check_clip(self.clip, self.clip_mode)

    def begin(self) -> None:
        config = self.config
        self.start = self.flat.copy()
        self.last = self.flat.zeros()
        self.gap = GapPenalty(config.gap_penalty, self.flat, config.injection)
        self.momentum = Momentum(self.flat, config.outer_momentum, config.clip, config.clip_mode)

    def end_round(self) -> None:
        lr = max(self.lr(group) for group in range(len(self.optimizer.param_groups)))
        self.gap.see(lr)
        arrived = self.mean.wait()
        if arrived is not None:
            self.gap.update(self.momentum.norm, lr)
            self.momentum.step(arrived, self.gap)
        for chunk in self.flat.chunks:
            start, last = chunk.of(self.start), chunk.of(self.last)
            buffer, x = chunk.of(self.mean.buffer), self.flat.local(chunk)
            if arrived is not None:
                last.sub_(buffer)  # δ_{t−1} − p^i_{t−1}, zero before the first arrival
            start.sub_(x)  # −p^i_t
            buffer.copy_(start)
            x.add_(last).sub_(chunk.of(self.momentum.vector), alpha=self.config.injection)
            chunk.write(x)
            last.copy_(start)
            start.copy_(x)
        self.mean.start()

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
