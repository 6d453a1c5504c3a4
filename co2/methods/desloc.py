"""DES-LOC (Iacob et al., 2025, arXiv 2505.22549) around Adam or AdamW. Blocking.

    after every K_x steps:  x ← mean_i x^i
    after every K_u steps:  m ← mean_i m^i          Adam's first moment, the paper's u
    after every K_v steps:  v ← mean_i v^i          Adam's second moment. Wait for each

K_x → `tau`, K_u → `first_moment_every`, K_v → `second_moment_every`. What changes slowly can be
averaged rarely: the half-life of a moment is ln ½/ln β steps. With K_u = K_v = K_x this is Local
Adam. All three means go through one buffer, one after the other. The mean of the x^i is the
consensus, because nothing is under way between two steps.
Chosen here: an element whose own v is 0, say because this replica has not seen its token yet, takes
in no mean of m, which divided by ε would be a huge step. Where v is small but not 0 a step may
still be larger than Adam's own; with K_v = K_u it cannot. If both are due, v is averaged first.
Deviations: pseudo-gradients travel, not parameters, as in local_sgd.py. The paper averages moments
at the begin of a step, which is the end of the one before, and clips local gradients, which
`train.clip_norm` does. Momentum of SGD and other optimizers are left out.
"""

from dataclasses import dataclass

from torch import Tensor

from co2.limits import Count, Limited
from co2.methods.base import synchronizing
from co2.methods.local_sgd import LocalSGD
from co2.methods.shared.moments import Moment, refused, require_adam


class DESLOC(LocalSGD):
    may_change = frozenset({"tau", "first_moment_every", "second_moment_every"})

    @dataclass
    class Config(Limited):
        tau: Count = 12
        """K_x: steps between two means of the weights."""
        first_moment_every: Count = 36
        """K_u: steps between two means of m. The paper: 3 K_x."""
        second_moment_every: Count = 72
        """K_v: steps between two means of v. The paper: 6 K_x."""

    def refusals(self) -> dict[str, str]:
        return {**super().refusals(), **refused()}

    def init_outer_state(self) -> None:
        require_adam(self)
        super().init_outer_state()
        periods = self.config.first_moment_every, self.config.second_moment_every
        self.periods = [
            (Moment(self.flat, self.optimizer, number), period)
            for number, period in enumerate(periods)
        ]

    def first_means(self) -> dict[str, int]:
        moments = ("first moments", "second moments")
        periods = (period for _, period in self.periods)
        return {**super().first_means(), **dict(zip(moments, periods, strict=True))}

    def scratch_tensors(self) -> list[Tensor]:
        own = [tensor for moment, _ in self.periods for tensor in moment.scratch_tensors()]
        return [*super().scratch_tensors(), *own]

    def update(self) -> None:
        super().update()
        (m, m_every), (v, v_every) = self.periods
        with synchronizing():
            if self.steps % v_every == 0:
                v.average(self.mean)
            if self.moments is None and self.steps % m_every == 0:  # else m is averaged late
                m.average(self.mean, divisor=v)
