"""MT-DAO (Iacob et al., ICLR 2026, arXiv 2510.05361) with one momentum, around AdamW. Blocking.

    every step, on every replica i, with its gradient g:
        u ← β u + (1−β) g;  v ← β2 v + (1−β2) g²
        x ← x − γ ((1−ω) g + ω û)/(√v̂ + ε) − γ λ x     û = u/(1−β^t), v̂ = v/(1−β2^t)
    after every K_x steps:  x ← mean_i x^i
    after every K_u steps:  u ← mean_i u^i          Wait for each
    after every K_v steps:  v ← mean_i v^i

β → `slow_beta`, ω → `slow_weight`, K_x → `tau`, K_u → `first_moment_every`, K_v →
`second_moment_every`; γ, β2, ε and λ are AdamW's. This is the paper's simplest form, N = 1, the
quasi-hyperbolic one (QHAdam: Ma and Yarats, ICLR 2019, arXiv 1810.06801). After K local steps β^K
of a momentum is left: 3 % of Adam's with K = 32, but 97 % of u with β = 0.999, so u keeps the
replicas' common direction, and the gradient follows what is new. With ω = 1 and Adam's β it is
DES-LOC, whose averages it has (desloc.py).

The mean of u may be late, because u hardly changes in a round. With `late_momentum` it is started
at a round's end, travels during the next round and arrives at the end of that, when β^τ of what was
sent is left in u (moments.py):  u^i ← u^i + β^τ (mean_i u^i − u^i)_then. That is exactly what
u would be, had the mean been taken in at once and the gradients been the same.

The equations were read in the abstract and in public summaries of the paper, which give neither ω
nor how momenta begin. Chosen here:
- ω = 0.7 and β = 0.995, as QHAdam's authors advise. The paper's β is about 0.999, in its studies
  0.99 and 0.995.
- The paper works with ADOPT, a variant of Adam, and β2 = 0.9999. Here it is AdamW with its
  corrections of the bias of u and v.
- What DES-LOC here does where an element's own v is 0 holds for u, late or not.
Deviations: those of desloc.py. AdamW's β1 is set to β, and its step completed to the one above.
"""

from dataclasses import dataclass

import torch

from co2.comm.collectives import local
from co2.errors import require
from co2.limits import Count, Decay, Limited, Share
from co2.methods.desloc import DESLOC
from co2.methods.shared.moments import LateMoments


class MTDAO(DESLOC):
    reads_gradients = True
    may_change = DESLOC.may_change | {"slow_weight"}

    @dataclass
    class Config(Limited):
        tau: Count = 12
        """K_x: steps between two means of the weights. The paper: 32."""
        slow_beta: Decay = 0.995
        """β: the share of the momentum that a step keeps, in place of AdamW's first beta."""
        slow_weight: Share = 0.7
        """ω: the momentum's weight in a step; the gradient has the rest."""
        first_moment_every: Count = 12
        """K_u: steps between two means of the momentum. The paper: K_x."""
        second_moment_every: Count = 12
        """K_v: steps between two means of v. The paper: K_x."""
        late_momentum: bool = False
        """Whether the mean of the momentum travels during the next round."""

        def __post_init__(self) -> None:
            super().__post_init__()
            whole = not self.late_momentum or self.first_moment_every % self.tau == 0
            hint = f"must be a multiple of tau, which is {self.tau}, with late_momentum=true"
            require(whole, "first_moment_every", self.first_moment_every, hint)

    def init_outer_state(self) -> None:
        super().init_outer_state()
        for group in self.optimizer.param_groups:
            decoupled = group["decoupled_weight_decay"] or not group["weight_decay"]
            plain = decoupled and not group["maximize"]
            kind = type(self.optimizer).__name__
            require(plain, "optim.name", kind, "mt_dao needs adamw, without maximize")
            group["betas"] = (self.config.slow_beta, group["betas"][1])
        if self.config.late_momentum:
            (_, every), (v, _) = self.periods
            self.moments = LateMoments(self, self.flat, (0,), divisor=v, every=every)

    def first_means(self) -> dict[str, int]:
        found = super().first_means()
        if self.config.late_momentum:
            found["first moments"] += self.config.tau
        return found

    def inner_step(self) -> None:
        super().inner_step()  # that of ω = 1
        if self.config.slow_weight < 1:
            self._mix_in_gradients()

    @torch.no_grad()
    def _mix_in_gradients(self) -> None:
        """Complete AdamW's step: in place of û/(√v̂ + ε) it has ((1−ω) g + ω û)/(√v̂ + ε)."""
        for owner, x, index in zip(
            self.flat.owners, self.flat.params, self.flat.group_of, strict=True
        ):
            if owner.grad is None:
                continue
            group, state = self.optimizer.param_groups[index], self.optimizer.state[owner]
            # In fp64, because 1 − β^t is small at first. On a GPU the host does not wait for it.
            steps = state["step"].double()
            first, second = (1 - beta**steps for beta in group["betas"])
            size = (local(state["exp_avg_sq"]) / second).sqrt_().add_(group["eps"])
            change = (local(state["exp_avg"]) / first).sub_(local(owner.grad))
            x.addcdiv_(change, size, value=self.lr(index) * (1 - self.config.slow_weight))
