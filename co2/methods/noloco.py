"""NoLoCo (Kolehmainen et al., 2025, arXiv 2506.10911): gossip in pairs. Blocking.

    for round t, on every replica i, which chance has paired with j:
        τ inner steps from x^i_{t,0} = φ^i to x^i_{t,τ};   Δ^i = x^i_{t,τ} − φ^i
        m^i ← β m^i + α mean_{i,j} Δ + γ (mean_{i,j} φ − φ^i)      wait for j
        φ^i ← φ^i + m^i;   x^i_{t+1,0} = φ^i

τ → `tau`, α → `outer_lr`, β → `outer_momentum`, γ → `pull`. A round waits for one other replica. Of
an odd number one is alone in each round: its means are its own. The outer weights φ^i differ; γ
pulls those of a pair together. The mean over all replicas of what a group does is what it would be
without groups, so the mean of the φ^i moves as in DiLoCo with heavy-ball momentum, whatever γ is.
The consensus is the mean of the x^i, after a round too. The inner optimizer may be any; its state
stays local and is kept.

Chosen here:
- One vector travels, α Δ + γ φ, of which m needs the mean. In the authors' public code Δ and φ both
  travel.
- The pairs of a round are drawn from the number of its last step.
- α, β and γ are those of that code. The paper's bound on γ could not be read. For an even number G
  of replicas, of which each pair is equally likely, the mean square of φ − mean φ decays without
  progress if and only if γ < 2 (1 − β²)/(1 − β/(G−1)). `pull` must be below this for every G.
Deviation: the paper's pipelines, whose stages change their partners too, are left out.
"""

from dataclasses import dataclass

import torch

from co2.comm.pair_mean import PairMean
from co2.errors import require
from co2.limits import Amount, Decay
from co2.methods.base import BF16, ELASTIC, QUORUM
from co2.methods.shared.local_method import LocalMethod
from co2.methods.shared.rounds import Tau, WaitingRounds


class NoLoCo(LocalMethod):
    may_change = frozenset({"tau", "outer_lr", "outer_momentum", "pull", "comm_share"})

    @dataclass
    class Config(WaitingRounds):
        tau: Tau = 12
        """Inner steps of a round; auto: chosen by measurement (auto_tau.py). The authors' public
        code: 50 and 100."""
        outer_lr: Amount = 0.7
        """α, the outer learning rate. The authors' public code: 0.7."""
        outer_momentum: Decay = 0.5
        """β, the outer momentum. The authors' public code: 0.5."""
        pull: Amount = 0.7
        """γ, how strongly a pair's outer weights are pulled together; below 2 (1 − β²). The
        authors' public code: 0.7."""

        def __post_init__(self) -> None:
            super().__post_init__()
            bound = 2 * (1 - self.outer_momentum**2)
            hint = f"must be below 2 (1 − outer_momentum²), which is {bound:.3g}"
            require(self.pull < bound, "pull", self.pull, hint)

    def refusals(self) -> dict[str, str]:
        return {
            **super().refusals(),
            ELASTIC: "a pair's exchange does not recover if one of the two is lost; use false",
            QUORUM: "the mean of a pair does not support weighted averaging; use null",
            BF16: "sends weights, of which bf16 loses the changes; use fp32",
        }

    def init_outer_state(self) -> None:
        self.outer = self.hold("outer", self.flat.copy())
        self.momentum = self.hold("momentum", self.flat.zeros())
        self.pairs = PairMean(self.mesh, self.mean)
        self.hold("received", self.pairs.received, saved=False)

    def end_round(self) -> None:
        alpha, beta, gamma = self.config.outer_lr, self.config.outer_momentum, self.config.pull
        for chunk in self.flat.chunks:
            outer, sent = chunk.of(self.outer), chunk.of(self.mean.buffer)
            torch.mul(outer, gamma - alpha, out=sent)
            sent.add_(chunk.read(), alpha=alpha)  # α Δ + γ φ
        mean = self.pairs.mean_now(seed=self.steps)
        for chunk in self.flat.chunks:
            outer, momentum = chunk.of(self.outer), chunk.of(self.momentum)
            momentum.mul_(beta).add_(chunk.of(mean)).sub_(outer, alpha=gamma)
            outer.add_(momentum)
            chunk.write(outer)
