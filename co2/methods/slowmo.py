"""SlowMo (Wang et al., ICLR 2020, arXiv 1910.00643, Algorithm 1). Blocking.

    for round t, on every replica i:
        τ inner steps with learning rate γ_t from x_{t,0} to x^i_{t,τ}
        d_t = mean_i (x_{t,0} − x^i_{t,τ})          wait for it
        m_t = β m_{t−1} + d_t/γ_t
        x_{t+1,0} = x_{t,0} − α γ_t m_t

τ → `tau`, α → `outer_lr`, β → `outer_momentum`; γ_t is each parameter group's own.
Deviations: the base optimizer's state is kept (the paper's "maintain" buffer strategy). For a round
that ends at γ_t = 0 the division is impossible, so its d_t is applied and stored unscaled.
"""

from dataclasses import dataclass

from torch import Tensor

from co2.comm.transfer import Chunk
from co2.limits import Amount, Decay
from co2.methods.shared.local_method import BlockingMethod
from co2.methods.shared.rounds import Tau, UnequalRounds


class SlowMo(BlockingMethod):
    may_change = frozenset({"tau", "outer_lr", "outer_momentum", "comm_share", "tau_power"})

    @dataclass
    class Config(UnequalRounds):
        tau: Tau = 12
        """Inner steps of a round; auto: chosen by measurement (auto_tau.py). The paper: 12 on
        CIFAR-10 and 48 on ImageNet."""
        outer_lr: Amount = 1.0
        """α, the outer learning rate. The paper: 1."""
        outer_momentum: Decay = 0.5
        """β, the outer momentum. The paper: 0.4 to 0.8."""

    def init_outer_state(self) -> None:
        super().init_outer_state()
        self.momentum = self.hold("momentum", self.flat.zeros(), replicated=True)

    def outer_step(self, chunk: Chunk, x: Tensor, d: Tensor) -> None:
        alpha, beta = self.config.outer_lr, self.config.outer_momentum
        gamma, m = self.lr(chunk.group), chunk.of(self.momentum)
        if gamma == 0:
            m.mul_(beta).add_(d)
            x.sub_(d, alpha=alpha)
        else:
            m.mul_(beta).add_(d, alpha=1 / gamma)
            x.sub_(m, alpha=alpha * gamma)
