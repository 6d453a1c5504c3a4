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

from co2.comm.flat import Chunk
from co2.config import Blocking
from co2.methods.parts.local import BlockingMethod, check_comm_share, check_tau, check_tau_power


class LocalSGD(BlockingMethod):
    blocking = Blocking.always
    may_change = frozenset({"tau", "comm_share", "tau_power"})

    @dataclass
    class Config:
        tau: int | str = 12
        """Inner steps of a round; auto: chosen by measurement (auto_tau.py)."""
        tau_power: float = 0.0
        """p: rounds of (γ_max/γ_t)^p steps, τ on the average (rounds.py); 0: all of τ steps."""
        comm_share: float = 0.1
        """With τ = auto: the largest share of a round's time that communication may take."""

        def __post_init__(self) -> None:
            check_tau(self.tau)
            check_tau_power(self.tau_power, self.tau)
            check_comm_share(self.comm_share)

    def outer_step(self, chunk: Chunk, x: Tensor, d: Tensor) -> None:
        x.sub_(d)
