"""Eager DiLoCo (Kale et al., 2025, arXiv 2502.12996). Fully overlapped.

    at the end of round t, on every replica i:
        D^i_t = x^i_{t,0} − x^i_{t,τ}               own pseudo-gradient
        mean_j D^j_{t−1} arrives                    taken during round t
        Δ^i_t = mean_j D^j_{t−1} + (D^i_t − D^i_{t−1})/G
        v^i_t = β v^i_{t−1} + Δ^i_t                 (outer_step.py, nesterov)
        x^i_{t+1,0} = x^i_{t,0} − α (Δ^i_t + β v^i_t)
        start the mean of D^i_t                     D_{−1} = 0

With `blocking_share` the first rounds wait for mean_j D^j_t, which is their Δ_t: they are DiLoCo's,
and the first round after them is as round 0.

τ → `tau`, α → `outer_lr`, β → `outer_momentum`; G replicas. Start and momentum differ between the
replicas: each knows its own G-th part of round t at once, and that of the others one round later.
Right after a round's end the consensus is the mean of these outer points, as DiLoCo's is the one it
has.
Deviation: with bf16 on the wire the rounded D^i_t, which is sent, is also what is added and, a
round later, subtracted. If one of them were exact, the replicas would drift apart by its rounding.
"""

from dataclasses import dataclass

import torch

from co2.comm.transfer import Chunk
from co2.limits import Amount, Decay
from co2.methods.base import QUORUM
from co2.methods.shared.local_method import LocalMethod
from co2.methods.shared.outer_step import nesterov
from co2.methods.shared.rounds import LateRounds


class EagerDiLoCo(LocalMethod):
    may_change = frozenset({"tau", "outer_lr", "outer_momentum", "blocking_share"})

    @dataclass
    class Config(LateRounds):
        outer_lr: Amount = 0.7
        """α, the outer learning rate."""
        outer_momentum: Decay = 0.9
        """β, the outer momentum."""

    def refusals(self) -> dict[str, str]:
        own = {QUORUM: "adds its own part, 1/G, before the others' are known; use null"}
        return {**super().refusals(), **own}

    def init_outer_state(self) -> None:
        self.round_start = self.hold("start", self.flat.copy())
        self.momentum = self.hold("momentum", self.flat.zeros())
        self.sent = self.hold("sent", self.flat.zeros())  # D^i of the last round
        self.share = 1 / self.mean.num_replicas  # the 1/G with which it was added
        self.keep(self, "share")

    def end_round(self) -> None:
        arrived, waits = self.mean.wait(), self.waits
        share, shared = 1 / self.mean.num_replicas, self.share
        for chunk in self.flat.chunks:
            start, delta = chunk.of(self.round_start), chunk.of(self.sent)
            buffer = chunk.of(self.mean.buffer)
            delta.mul_(-shared)
            if arrived is not None:
                delta.add_(buffer)
            torch.sub(start, chunk.read(), out=buffer)  # D^i_t, as it travels
            if not waits:
                self._go_on(chunk, share)
                delta.copy_(buffer)
        self.share = share
        self.mean.start()
        if waits:
            self.mean.wait()
            for chunk in self.flat.chunks:
                self._go_on(chunk, 1.0)
                chunk.of(self.sent).zero_()

    def _go_on(self, chunk: Chunk, share: float) -> None:
        """Complete Δ^i_t by this share of what is in the buffer, and do the outer step."""
        start, delta = chunk.of(self.round_start), chunk.of(self.sent)
        delta.add_(chunk.of(self.mean.buffer), alpha=share)
        alpha, beta = self.config.outer_lr, self.config.outer_momentum
        nesterov(start, chunk.of(self.momentum), delta, alpha, beta)
        chunk.write(start)
