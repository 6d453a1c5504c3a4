"""Local SGD (Stich, ICLR 2019, arXiv 1805.09767). Blocking.

    for round t, on every replica i:
        τ inner steps from x_{t,0} to x^i_{t,τ}
        d_t = mean_i (x_{t,0} − x^i_{t,τ})          wait for it
        x_{t+1,0} = x_{t,0} − d_t

τ → `tau`. The inner optimizer may be any; its state stays local and is kept.
Deviation: pseudo-gradients travel, not parameters; the arithmetic is the same.
"""

from dataclasses import dataclass

from torch import Tensor

from co2.comm.transfer import Chunk
from co2.methods.shared.local_method import BlockingMethod
from co2.methods.shared.rounds import UnequalRounds


class LocalSGD(BlockingMethod):
    may_change = frozenset({"tau", "comm_share", "tau_power"})

    @dataclass
    class Config(UnequalRounds):
        """Rounds are all that it has."""

    def outer_step(self, chunk: Chunk, x: Tensor, d: Tensor) -> None:
        x.sub_(d)
