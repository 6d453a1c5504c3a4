"""CO2 with kept progress: ours, unpublished. Overlapped for `delay` steps, at most a whole round.

    at the end of round t, on every replica i:
        p^i_t = the sum of i's own steps in round t;  start the mean δ_t = mean_i p^i_t
    `delay` steps later, q^i being the sum of i's own steps since:
        δ_t arrives;  u_t = β u_{t−1} + δ_t;  c_{t+1} = c_t + δ_t + w u_t          c: the center
        x^i ← c_{t+1} + κ q^i

τ → `tau`, delay → `delay`, κ → `keep_local`, β → `outer_momentum`, w → `momentum_weight`. c is the
same on all replicas, bit for bit; p^i counts all steps, those whose effect on x^i was cut by κ too,
so nothing is lost. With a delay of τ: κ = 1 and w = 0 is CoCoD-SGD, κ = w = 0 is CO2 with β = 0 and
Λ = 1. A delay of 0 is blocking: local SGD for w = 0, DiLoCo with α = 1 for w = β.

Why not all is kept (κ = 1): where the loss curves so much that `delay` steps undo a deviation from
the optimum of that direction, q^i holds the correction of what the mean corrects too. With a delay
of τ a replica's own deviation is then multiplied by −κ from round to round, and the replicas' mean
by (1 − κ)^½: one does not die out for κ = 1, the other not for κ = 0, as in CO2. Both shrink
fastest together at κ = .62. See docs/co2_keep.md for what else was tried.
As in every method here −p travels, the pseudo-gradient, and `momentum` holds −u.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from co2.comm.phases import OUTER_STEP
from co2.config import Waits
from co2.errors import require, require_number
from co2.methods.parts.auto_tau import AUTO
from co2.methods.parts.local import LocalMethod, check_share, check_tau


class CO2Keep(LocalMethod):
    waits = Waits.beyond_delay

    @dataclass
    class Config:
        tau: int | str = 12
        """Inner steps of a round, or auto (auto_tau.py)."""
        delay: int | None = None
        """Inner steps that a collective may take, at most τ; null: τ."""
        keep_local: float = 0.5
        """κ: share of the progress made meanwhile that stays when the mean arrives."""
        outer_momentum: float = 0.5
        """β."""
        momentum_weight: float = 0.0
        """w; 0 saves the momentum's copy of the model."""

        def __post_init__(self) -> None:
            check_tau(self.tau)
            if self.delay is not None:
                require(self.tau != AUTO, "delay", self.delay, "must be null with tau=auto")
                whole = isinstance(self.delay, int) and not isinstance(self.delay, bool)
                hint = f"must be a whole number of steps, at most tau, which is {self.tau}; or null"
                require(whole and 0 <= self.delay <= int(self.tau), "delay", self.delay, hint)
            require(0 <= self.keep_local <= 1, "keep_local", self.keep_local, "must lie in [0, 1]")
            check_share("outer_momentum", self.outer_momentum)
            hint = "must be a finite number, 0 or more"
            require_number("momentum_weight", self.momentum_weight, 0.0, hint)

    def init_outer_state(self) -> None:
        self.start = self.flat.copy()  # the round's progress counts from here
        self.center = self.flat.copy()
        self.momentum = self.flat.zeros() if self.config.momentum_weight > 0 else None

    def state_tensors(self) -> dict[str, Tensor]:
        momentum = {} if self.momentum is None else {"momentum": self.momentum}
        own = {"start": self.start, "center": self.center, **momentum}
        return {**super().state_tensors(), **own}

    def step(self) -> None:
        super().step()
        if self.mean.in_flight and self.steps - self.round_began == self.config.delay:
            with torch.no_grad(), record_function(OUTER_STEP), self.flat.round():
                self.arrive()

    def end_round(self) -> None:
        if self.mean.in_flight:  # for a whole round
            self.arrive()
        for chunk in self.flat.chunks:
            start, buffer = chunk.of(self.start), chunk.of(self.mean.buffer)
            x = self.flat.local(chunk)
            torch.sub(start, x, out=buffer)  # −p^i_t
            start.copy_(x)
        self.mean.start()

    def arrive(self) -> None:
        """δ_t has come: move the center, and the replica to it."""
        beta, w, kept = (
            self.config.outer_momentum,
            self.config.momentum_weight,
            self.config.keep_local,
        )
        mean = self.mean.wait()
        assert mean is not None
        for chunk in self.flat.chunks:
            d, center, start = chunk.of(mean), chunk.of(self.center), chunk.of(self.start)
            center.sub_(d)
            if self.momentum is not None:
                center.sub_(chunk.of(self.momentum).mul_(beta).add_(d), alpha=w)
            x = self.flat.local(chunk)
            start.sub_(x)  # −q^i
            torch.sub(center, start, alpha=kept, out=x)
            chunk.write(x)
            start.add_(x)  # so that start − x is −q^i still

    @property
    def max_skew_steps(self) -> int:
        # A replica cannot pass an arrival before all have ended that round.
        return self.tau + (self.tau if self.config.delay is None else self.config.delay)
