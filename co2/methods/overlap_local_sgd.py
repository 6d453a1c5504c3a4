"""Overlap-Local-SGD (Wang et al., ICASSP 2020, arXiv 2002.09539). Fully overlapped.

    at the end of round t, on every replica i:
        the mean x̄ that was started one round before arrives:
            v ← β v + (z − x̄);   z ← z − v
        x^i ← (1−a) x^i + a z                       pull towards the anchor
        start the mean of the pulled x^i

τ → `tau`, a → `pull`, β → `outer_momentum`. Right after a round's end the consensus is the mean of
the x^i before the pull, towards a z that misses the newest round. They follow from the pulled x^i
and z, which cost them 1/(1−a) times their rounding.
Deviation: z − x^i travels, not x^i. The anchor does not move while it travels, so z − x̄ itself
arrives.
"""

from dataclasses import dataclass

import torch

from co2.config import Blocking
from co2.methods.parts.local import LocalMethod, check_share, check_tau


class OverlapLocalSGD(LocalMethod):
    blocking = Blocking.beyond_delay
    may_change = frozenset({"tau", "outer_momentum"})

    @dataclass
    class Config:
        tau: int | str = 12
        """Inner steps of a round; auto: chosen by measurement (auto_tau.py)."""
        pull: float = 0.6
        """a, how far a replica is pulled to the anchor after a round. The paper: 0.6."""
        outer_momentum: float = 0.7
        """β, the outer momentum. The paper: 0.7."""

        def __post_init__(self) -> None:
            check_tau(self.tau)
            check_share("pull", self.pull)
            check_share("outer_momentum", self.outer_momentum)

    def init_outer_state(self) -> None:
        self.anchor = self.hold("anchor", self.flat.copy(), replicated=True)
        self.momentum = self.hold("momentum", self.flat.zeros(), replicated=True)

    def end_round(self) -> None:
        arrived = self.mean.wait()
        for chunk in self.flat.chunks:
            z, v = chunk.of(self.anchor), chunk.of(self.momentum)
            buffer, x = chunk.of(self.mean.buffer), self.flat.read(chunk)
            if arrived is not None:
                v.mul_(self.config.outer_momentum).add_(buffer)
                z.sub_(v)
            x.lerp_(z, self.config.pull)
            chunk.write(x)
            torch.sub(z, x, out=buffer)
        self.mean.start()

    def show_round_end(self) -> None:
        """Undo the pull: x^i + a/(1−a) (x^i − z)."""
        pull = self.config.pull
        for chunk in self.flat.chunks:
            x = self.flat.read(chunk)
            chunk.write(x.lerp_(chunk.of(self.anchor), -pull / (1 - pull)))
