"""CO2 with kept progress: our own, unpublished. Overlapped for `delay` steps, at most a round.

    at the end of round t, on every replica i:
        p^i_t = the sum of i's own steps in round t;  start the mean δ_t = mean_i p^i_t
    `delay` steps later, q^i being the sum of i's own steps since:
        δ_t arrives;  u_t = β u_{t−1} + δ_t;  c_{t+1} = c_t + δ_t + w u_t          c: the center
        x^i ← c_{t+1} + κ q^i

τ → `tau`, delay → `delay`, κ → `keep_local`, β → `outer_momentum`, w → `momentum_weight`.
c is equal on all replicas, bit for bit. p^i counts every step, also those whose effect on x^i was
cut by κ, so that no progress is lost. With a delay of τ, κ = 1 and w = 0 is CoCoD-SGD, and
κ = w = 0 is CO2 with β = 0 and Λ = 1. A delay of 0 blocks: it is local SGD for w = 0, and DiLoCo
with α = 1 for w = β. It is that of the first rounds with `blocking_share`. Right after a round's
end the consensus is c + mean_i p^i_t: all that is known and all that was trained. The mean of the
x^i lacks what κ has cut.

Why κ is below 1: in a direction of such high curvature that `delay` steps undo a deviation from the
optimum, q^i holds the same correction that the mean brings. With a delay of τ a replica's own
deviation is then multiplied by −κ from round to round, and that of the replicas' mean by (1 − κ)^½:
the former does not die out for κ = 1, the latter not for κ = 0, as in CO2. Both shrink fastest
together at κ = 0.62. docs/co2_keep.md tells what else was tried.
As in every method here the pseudo-gradient −p travels, and `momentum` holds −u.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from co2.errors import require
from co2.limits import Amount, Decay, Share, Steps
from co2.methods.base import synchronizing
from co2.methods.shared.auto_tau import AUTO
from co2.methods.shared.local_method import LocalMethod
from co2.methods.shared.rounds import AveragesMoments, LateRounds


class CO2Keep(LocalMethod):
    may_change = frozenset({"tau", "keep_local", "outer_momentum", "blocking_share"})

    @dataclass
    class Config(AveragesMoments, LateRounds):
        delay: Steps | None = None
        """Inner steps that a collective may take without anybody waiting, at most τ; null: τ."""
        keep_local: Share = 0.5
        """κ: the share of the progress made while the mean was under way that is kept."""
        outer_momentum: Decay = 0.9
        """β, the outer momentum."""
        momentum_weight: Amount = 0.0
        """w, the weight of the means' momentum; with 0 there is none, which saves a copy of the
        model."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.delay is not None:
                require(self.tau != AUTO, "delay", self.delay, "must be null with tau=auto")
                hint = f"must be at most tau, which is {self.tau}; or null"
                require(self.delay <= int(self.tau), "delay", self.delay, hint)

    def init_outer_state(self) -> None:
        # The round's progress counts from here.
        self.round_start = self.hold("start", self.flat.copy())
        self.center = self.hold("center", self.flat.copy(), replicated=True)
        self.momentum: Tensor | None = None
        if self.config.momentum_weight > 0:
            self.momentum = self.hold("momentum", self.flat.zeros(), replicated=True)

    def update(self) -> None:
        super().update()
        delay = 0 if self.waits else self.config.delay
        if self.mean.in_flight and self.steps - self.round_began == delay:
            with synchronizing(), self.flat.round():
                self.arrive()

    def end_round(self) -> None:
        self.arrive()  # with a delay of a whole round
        for chunk in self.flat.chunks:
            start, buffer = chunk.of(self.round_start), chunk.of(self.mean.buffer)
            x = chunk.read()
            torch.sub(start, x, out=buffer)  # −p^i_t
            start.copy_(x)
        self.mean.start()

    def show_round_end(self) -> None:
        """Show c + δ_t, and wait for δ_t, unless it is in c already."""
        if not self.mean.in_flight:
            return
        self.mean.peek()
        for chunk in self.flat.chunks:
            x = chunk.read()
            chunk.write(torch.sub(chunk.of(self.center), chunk.of(self.mean.buffer), out=x))

    def arrive(self) -> None:
        """Take δ_t, if it is under way: move the center by it, and the replica to the center."""
        beta, w = self.config.outer_momentum, self.config.momentum_weight
        mean = self.mean.wait()
        for chunk in self.flat.chunks if mean is not None else ():
            d, center = chunk.of(self.mean.buffer), chunk.of(self.center)
            start = chunk.of(self.round_start)
            center.sub_(d)
            if self.momentum is not None:
                center.sub_(chunk.of(self.momentum).mul_(beta).add_(d), alpha=w)
            x = chunk.read()
            start.sub_(x)  # −q^i
            torch.sub(center, start, alpha=self.config.keep_local, out=x)
            chunk.write(x)
            start.add_(x)  # so that start − x is still −q^i
        if self.moments is not None:
            self.moments.arrive(self.steps)

    @property
    def first_mean(self) -> int:
        return self.tau + (self.tau if self.config.delay is None else self.config.delay)
