"""DiLoCo (Douillard et al., 2023, arXiv 2311.08105). Blocking.

    for round t, on every replica i:
        τ inner steps from x_{t,0} to x^i_{t,τ}     the paper: AdamW
        d_t = mean_i (x_{t,0} − x^i_{t,τ})          wait for it
        v_t = β v_{t−1} + d_t                       (outer_step.py, nesterov)
        x_{t+1,0} = x_{t,0} − α (d_t + β v_t)

τ → `tau` (the paper's H), α → `outer_lr`, β → `outer_momentum`.
Deviations: none known. The inner optimizer may be any; its state stays local and is kept.
"""

from dataclasses import dataclass

from torch import Tensor

from co2.comm.transfer import Chunk
from co2.limits import Amount, Decay
from co2.methods.shared.local_method import BlockingMethod
from co2.methods.shared.outer_step import nesterov
from co2.methods.shared.rounds import AveragesMoments, Tau, UnequalRounds


class DiLoCo(BlockingMethod):
    may_change = frozenset({"tau", "outer_lr", "outer_momentum", "comm_share", "tau_power"})

    @dataclass
    class Config(AveragesMoments, UnequalRounds):
        tau: Tau = 12
        """Inner steps of a round; auto: chosen by measurement (auto_tau.py). The paper: 500."""
        outer_lr: Amount = 0.7
        """α, the outer learning rate. The paper: 0.7."""
        outer_momentum: Decay = 0.9
        """β, the outer momentum. The paper: 0.9."""

    def init_outer_state(self) -> None:
        super().init_outer_state()
        self.momentum = self.hold("momentum", self.flat.zeros(), replicated=True)

    def outer_step(self, chunk: Chunk, x: Tensor, d: Tensor) -> None:
        alpha, beta = self.config.outer_lr, self.config.outer_momentum
        nesterov(x, chunk.of(self.momentum), d, alpha, beta)
