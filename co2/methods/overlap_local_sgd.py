"""Overlap-Local-SGD (Wang et al., ICASSP 2020, arXiv 2002.09539). Fully overlapped.

    at the end of round t, on every replica i:
        the mean x̄ that was started one round before arrives:
            v ← β v + (z − x̄);   z ← z − v
        x^i ← (1−a) x^i + a z                       pull towards the anchor
        start the mean of the pulled x^i

With `blocking_share` the first rounds wait for the mean of the x^i before the pull, which is then
towards a z that misses nothing; at the end of the first round after them nothing arrives.

τ → `tau`, a → `pull`, β → `outer_momentum`. Right after a round's end the consensus is the mean of
the x^i before the pull, towards a z that misses the newest round. They follow from the pulled x^i
and z, which cost them 1/(1−a) times their rounding.
Deviation: z − x^i travels, not x^i. The anchor does not move while it travels, so z − x̄ itself
arrives.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from co2.comm.transfer import Chunk
from co2.limits import Decay
from co2.methods.shared.local_method import LocalMethod
from co2.methods.shared.rounds import LateRounds


class OverlapLocalSGD(LocalMethod):
    may_change = frozenset({"tau", "outer_momentum", "blocking_share"})

    @dataclass
    class Config(LateRounds):
        pull: Decay = 0.6
        """a, how far a replica is pulled to the anchor after a round. The paper: 0.6."""
        outer_momentum: Decay = 0.7
        """β, the outer momentum. The paper: 0.7."""

    def init_outer_state(self) -> None:
        self.anchor = self.hold("anchor", self.flat.copy(), replicated=True)
        self.momentum = self.hold("momentum", self.flat.zeros(), replicated=True)

    def end_round(self) -> None:
        arrived, waits = self.mean.wait(), self.waits
        if waits:
            for chunk in self.flat.chunks:
                self._move_anchor(chunk, arrived)
                buffer = chunk.of(self.mean.buffer)
                torch.sub(chunk.of(self.anchor), chunk.read(), out=buffer)
            arrived = self.mean.mean_now()
        for chunk in self.flat.chunks:
            self._move_anchor(chunk, arrived)
            z, x = chunk.of(self.anchor), chunk.read()
            chunk.write(x.lerp_(z, self.config.pull))
            torch.sub(z, x, out=chunk.of(self.mean.buffer))
        if not waits:
            self.mean.start()

    def _move_anchor(self, chunk: Chunk, arrived: Tensor | None) -> None:
        """Move it by the mean of z − x^i, if that has arrived."""
        if arrived is not None:
            v = chunk.of(self.momentum)
            v.mul_(self.config.outer_momentum).add_(chunk.of(arrived))
            chunk.of(self.anchor).sub_(v)

    def show_round_end(self) -> None:
        """Undo the pull: x^i + a/(1−a) (x^i − z)."""
        pull = self.config.pull
        for chunk in self.flat.chunks:
            x = chunk.read()
            chunk.write(x.lerp_(chunk.of(self.anchor), -pull / (1 - pull)))
