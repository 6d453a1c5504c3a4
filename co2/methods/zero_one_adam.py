"""0/1 Adam (Lu et al., ICLR 2023, arXiv 2202.06009, Algorithm 1). Blocking, at few steps.

    step t = 0, 1, …, on every replica i:
        t ∈ T_v:   g^i ← mean_i g^i;  v ← v + (1−β2)/(1−β2^r) (g² − v)      r-th refresh
        m ← β1 m + (1−β1) g^i;  u ← u + γ_t m
        t ∉ T_u:   x ← x − γ_t m/(√v + ε)
        t ∈ T_u:   ū = 1-bit mean of u (co2/comm/compressed_mean.py); at t ∈ T_v it is u
                   m = ū/Σγ;  x = x_{t'} − ū/(√v + ε);  u = 0          Σ since t', the last of T_u

T_v starts at 0; its interval doubles after every κ refreshes, and it ends before `freeze_step`.
T_u has every step until then. After it the interval is 1, and doubles whenever the learning rate
has halved, up to `max_interval` (the paper's H): from a t in T_u to the next there are
2^⌊log2(γ_max/γ_t)⌋ steps, γ_max being the largest rate so far; or, with `double_every`,
2^⌊(t − freeze_step)/double_every⌋.
κ → `kappa`. This method takes the place of the inner Adam or AdamW: γ, β1, β2, ε and weight decay
are those of each of its parameter groups; the paper's β1 and β2 are 0.9 and 0.999.
Chosen here:
- v is refreshed before it is used, because the first step would otherwise divide by ε. It is Adam's
  bias-corrected v, because refreshes soon become too rare to outgrow the bias. m has no correction,
  as in the paper, so about the first 1/(1−β1) steps are short.
- At a refresh the exact mean of the gradients is known, and the replicas differ in nothing else. So
  m takes in that mean, and u needs no exchange. In the paper m takes in the replica's own gradient,
  and both travel.
- Every parameter tensor has a scale of its own, where the paper has one scale for all
  (co2/comm/compressed_mean.py says why).
- Elements whose v is 0, or next to nothing beside their tensor's, are moved by refreshes and by
  weight decay alone, and their m and u are 0 after a compressed exchange (the mask,
  shared/compressed_adam.py). The authors' code has a mask too, which users fill in by hand.
- `compress: update` sends the signs of u/(√v + ε), and multiplies by √v + ε on arrival. That is not
  the paper's; results/tables/zero_one_training.md compares the two.
- AdamW's decay shrinks x_{t'} by the same factors as x. If Σγ = 0, m starts from 0 again.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from co2.limits import Count
from co2.methods.shared.compressed_adam import CompressedAdam, CompressedAdamConfig


class ZeroOneAdam(CompressedAdam):
    @dataclass
    class Config(CompressedAdamConfig):
        """The paper freezes v at the end of the learning rate's warm-up, and from then on the
        interval of T_u may grow."""

        kappa: Count = 16
        """κ: the number of refreshes of v after which their interval doubles. The paper: 16."""
        double_every: Count | None = None
        """Steps after which the interval of T_u doubles, once v is frozen; null: it doubles when
        the learning rate has halved, as in the paper."""
        max_interval: Count = 16
        """Longest interval of T_u. The paper: 16."""

    def set_up(self) -> nn.Module:
        model = super().set_up()
        self.u = self.hold("u", self.flat.zeros())
        self.anchor = self.hold("anchor", self.flat.copy())
        """x_{t'}, which all replicas share."""
        self.refreshes = self.next_refresh = 0
        self.next_sync, self.interval = 0, 1
        self.largest_lr = 0.0
        groups = len(self.optimizer.param_groups)
        self.lr_sums, self.shrunk = [0.0] * groups, [1.0] * groups
        self.keep(self, "refreshes", "next_refresh", "next_sync", "interval", "largest_lr")
        self.keep(self, "lr_sums", "shrunk")
        return model

    @torch.no_grad()
    def update(self) -> None:
        t = self.steps - 1  # the paper counts from 0
        refreshing = t == self.next_refresh and t < self.config.freeze_step
        self.largest_lr = max(self.largest_lr, self.highest_lr())
        self.flat.gradients(out=self.mean.buffer)
        if refreshing:
            self.average_gradients()
        self._take_in_gradients()
        if refreshing:
            self._refresh_v(t)
        if t == self.config.freeze_step:
            self.mask_is_new = True
        self._accumulate()
        if t == self.next_sync:
            if not refreshing:
                self._exchange()
            self._return(t)
        else:
            self._move()

    def interval_after(self, t: int) -> int:
        """Return the steps from an exchange at step t, the newest one, to the next."""
        if t < self.config.freeze_step:
            return 1
        return interval(
            self.config.max_interval,
            self.highest_lr() / self.largest_lr if self.largest_lr > 0 else 1.0,
            t - self.config.freeze_step,
            self.config.double_every,
        )

    def _take_in_gradients(self) -> None:
        for chunk in self.flat.chunks:
            g = chunk.of(self.mean.buffer)
            self.add_l2(chunk, g)
            chunk.of(self.m).lerp_(g, 1 - self.betas(chunk.group)[0])

    def _refresh_v(self, t: int) -> None:
        self.next_refresh = t + refresh_interval(self.refreshes, self.config.kappa)
        self.refreshes += 1
        for chunk in self.flat.chunks:
            second = self.betas(chunk.group)[1]
            weight = (1 - second) / (1 - second**self.refreshes)
            g = chunk.of(self.mean.buffer)
            chunk.of(self.v).mul_(1 - weight).addcmul_(g, g, value=weight)
        self.set_mask()

    def _accumulate(self) -> None:
        for group in range(len(self.lr_sums)):
            self.lr_sums[group] += self.lr(group)
            self.shrunk[group] *= self.shrinkage(group)
        for chunk in self.flat.chunks:
            chunk.of(self.u).add_(chunk.of(self.m), alpha=self.lr(chunk.group))

    def _move(self) -> None:
        for chunk in self.flat.chunks:
            x = chunk.read()
            x.mul_(self.shrinkage(chunk.group))
            x.addcdiv_(chunk.of(self.m), self.divisor(chunk), value=-self.lr(chunk.group))
            chunk.write(x)

    def _exchange(self) -> None:
        self.average_signs(self.u)
        for chunk in self.flat.chunks:
            m, lr_sum = chunk.of(self.m), self.lr_sums[chunk.group]
            if lr_sum > 0:
                torch.div(chunk.of(self.u), lr_sum, out=m)
            else:
                m.zero_()

    def _return(self, t: int) -> None:
        """Set x to x_{t'}, which all replicas share, moved by the exchanged u; start anew there."""
        for chunk in self.flat.chunks:
            u, x = chunk.of(self.u), chunk.of(self.anchor)
            x.mul_(self.shrunk[chunk.group]).addcdiv_(u, self.divisor(chunk), value=-1)
            chunk.write(x)
        self.u.zero_()
        self.lr_sums, self.shrunk = [0.0] * len(self.lr_sums), [1.0] * len(self.shrunk)
        self.interval = self.interval_after(t)
        self.next_sync = t + self.interval

    def loaded(self) -> None:
        if self.refreshes:
            self.set_mask()

    def figures(self) -> dict[str, float]:
        """`interval`: steps from the newest exchange to the next."""
        return {**super().figures(), "interval": float(self.interval)}


def refresh_interval(refreshes: int, kappa: int) -> int:
    """The steps from a refresh of v to the next, after so many before it."""
    return 2 ** (refreshes // kappa)


def interval(max_interval: int, lr_share: float, since: int, double_every: int | None) -> int:
    """The steps from one exchange to the next, once v is frozen.

    Args:
        max_interval: the longest.
        lr_share: the learning rate at the exchange, as a share of the largest so far.
        since: steps since v was frozen.
        double_every: see `ZeroOneAdam.Config`.
    """
    if double_every is not None:
        doublings = since // double_every
    elif lr_share > 0:
        doublings = math.floor(-math.log2(lr_share) + 1e-9)  # a half is a half, however rounded
    else:
        doublings = max_interval
    return min(2 ** min(max(0, doublings), max_interval), max_interval)
