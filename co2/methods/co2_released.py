"""What the authors' released code computes as CO2 if initialized before training. Blocking.

    for round t, on every replica i:
        τ inner steps from x_{t,0} to x^i_{t,τ}
        d_t = mean_i (x_{t,0} − x^i_{t,τ})          wait for it
        m_t = β m_{t−1} + d_t/Λ                     Λ is a constant
        x_{t+1,0} = x_{t,0} − α m_t

τ → `tau`, α → `outer_lr`, β → `outer_momentum`, Λ → `gap_penalty`. Read from
weigao266/fairscale-CO2 at 55aaca5, fairscale/experimental/nn/data_parallel/gossip/co2.py: the
reduction to the shards of the momentum and the broadcast from them are both waited for
(`_global_momentum_step`); Λ is `co2_gap_penalty`, 1.0; what `_co2_clip` clamps is thrown away, so
there is no clip.
Chosen here: x_{0,0} is the weights that all replicas begin with. That code has it too, if its
`_init_global_momentum_buffers` is called before the first step. Called as its docstring shows, it
initializes in the first `perform_co2`, after the optimizer's step: each shard of x_{0,0} is then
its owner's weights after one inner step.
Left out: the thread that averages parameters every `localsgd_frequency` steps. It is woken by an
outer step only, and passes over those, so that with the released periods of 48 and 3 it does
nothing unless it is late. With unsharded momentum nothing but that thread communicates.
"""

from dataclasses import dataclass

from torch import Tensor

from co2.comm.transfer import Chunk
from co2.limits import Amount, Decay, Positive
from co2.methods.shared.local_method import BlockingMethod
from co2.methods.shared.rounds import Tau, WaitingRounds


class CO2Released(BlockingMethod):
    may_change = frozenset({"tau", "outer_lr", "outer_momentum", "gap_penalty", "comm_share"})

    @dataclass
    class Config(WaitingRounds):
        tau: Tau = 48
        """Inner steps of a round; auto: chosen by measurement (auto_tau.py). The code: 48."""
        outer_lr: Amount = 1.0
        """α, the outer learning rate. The code: 1."""
        outer_momentum: Decay = 0.5
        """β, the outer momentum. The code: 0.5; its example: 0.2."""
        gap_penalty: Positive = 1.0
        """Λ. The code: 1."""

    def init_outer_state(self) -> None:
        super().init_outer_state()
        self.momentum = self.hold("momentum", self.flat.zeros(), replicated=True)

    def outer_step(self, chunk: Chunk, x: Tensor, d: Tensor) -> None:
        m = chunk.of(self.momentum)
        m.mul_(self.config.outer_momentum).add_(d, alpha=1 / self.config.gap_penalty)
        x.sub_(m, alpha=self.config.outer_lr)
