"""The parts of the outer step that several methods share: gap penalty, momentum, clip, Nesterov.

Everything works in place on chunks that fit the cache, so that there is no temporary of the model's
size. Figures stay on the device as scalars, so that the host never waits for a GPU.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from co2.comm.cuts import Part
from co2.comm.flat import FlatParams
from co2.comm.reproducible import row_norms, squared_norm
from co2.methods.shared.outer_shard import OuterShard

GapKind = Literal["gap_aware", "gap_aware_steady", "gap_aware_elementwise", "none"]


class GapPenalty:
    """The staleness gap Λ_t that divides a pseudo-gradient which arrives one round late.

    After Gap-Aware (Barkai et al., arXiv 1909.10802). With disp_t = ‖x_{t,0} − x_{t−1,0}‖₂/√n,
    the outer movement made while the collective was in flight, and γ the inner learning rate,

        C_t = EMA_{0.9}(disp_t · γ_max/γ_t), bias-corrected;   Λ_t = 1 + disp_t/C_t

    and Λ_t = 1 while C_t = 0 or γ_t = 0. The EMA counts every round in which a pseudo-gradient
    arrives, also the first, whose displacement is 0.
    A pseudo-gradient that is waited for is not late: Λ_t = 1, and the EMA does not count it.
    `gap_aware_elementwise` puts an element's own |x_{t,0} − x_{t−1,0}| in place of disp_t.
    `gap_aware_steady` takes C_t from displacements alone, without γ_max/γ_t. That factor makes Λ go
    to 1 as the rate decays, where a pseudo-gradient that is one round late is not damped any more;
    without it Λ stays near 2 (docs/choosing.md has the rule).

    Args:
        kind: the configuration's `gap_penalty`.
        flat: the vector, or the shard of it, that the momentum belongs to.
    """

    def __init__(self, kind: str | float, flat: FlatParams | OuterShard) -> None:
        self.kind, self.sqrt_numel = kind, flat.total_numel**0.5
        self.ema = torch.zeros((), dtype=torch.float64, device=flat.device)
        self.value = torch.ones((), dtype=torch.float64, device=flat.device)
        """Λ_t; for the elementwise kind, the Λ of an element with a displacement of disp_t."""
        self.scale = torch.zeros((), dtype=torch.float64, device=flat.device)
        """C_t; 0 while it is not defined."""
        self.count = 0
        self.largest_lr = self._moved = 0.0
        self._scratch = torch.empty(0, dtype=flat.dtype, device=flat.device)

    def scratch_tensors(self) -> list[Tensor]:
        """One chunk for the elementwise kind, else nothing."""
        return [self._scratch]

    @property
    def measures(self) -> bool:
        """Whether the size of the last outer movement is needed."""
        return isinstance(self.kind, str) and self.kind != "none"

    @property
    def constant(self) -> float:
        """Λ of a kind that does not measure."""
        return 1.0 if self.kind == "none" else float(self.kind)

    def usual(self, lr: float) -> float:
        """Return what Λ comes to at a rate of γ_t if displacements do not change."""
        if not self.measures:
            return self.constant
        if self.kind == "gap_aware_steady" or self.largest_lr == 0:
            return 2.0
        return 1 + lr / self.largest_lr

    def observe_lr(self, lr: float) -> None:
        """Take note of γ_t. Call it in every round, the first too."""
        self.largest_lr = max(self.largest_lr, lr)

    def update(self, momentum_norm: Tensor, lr: float, moved: float) -> None:
        """Compute Λ_t of a late pseudo-gradient.

        Args:
            momentum_norm: ‖m_{t−1}‖₂.
            lr: γ_t.
            moved: α, for x_{t,0} − x_{t−1,0} = −α m_{t−1}; 0 where the two are equal.
        """
        self._moved = moved
        if not self.measures:
            self.value.fill_(self.constant)
            return
        if lr == 0:
            self.not_late()
            return
        displacement = momentum_norm * (moved / self.sqrt_numel)
        decayed = 1.0 if self.kind == "gap_aware_steady" else self.largest_lr / lr
        self.ema.mul_(0.9).add_(displacement * decayed, alpha=0.1)
        self.count += 1
        torch.div(self.ema, 1 - 0.9**self.count, out=self.scale)
        self.value.copy_(torch.where(self.scale > 0, 1 + displacement / self.scale, 1.0))

    def not_late(self) -> None:
        """Set Λ_t to 1."""
        self.value.fill_(1.0)
        self.scale.zero_()

    def divisor(self, momentum: Tensor) -> Tensor:
        """Return Λ_t for the elements whose m_{t−1} is given: a scalar, or one value for each, in
        scratch that the next call overwrites."""
        if self.kind != "gap_aware_elementwise":
            return self.value.to(momentum.dtype)
        per_element = torch.where(self.scale > 0, self._moved / self.scale, 0.0)
        if self._scratch.numel() < momentum.numel():
            self._scratch = torch.empty_like(momentum)
        out = self._scratch[: momentum.numel()]
        return torch.abs(momentum, out=out).mul_(per_element.to(momentum.dtype)).add_(1.0)


class Momentum:
    """The outer momentum: m ← clip(β m + d/Λ, φ). It is stored as clipped."""

    def __init__(
        self, flat: FlatParams | OuterShard, beta: float, clip: float | None, clip_mode: str
    ) -> None:
        self.flat, self.beta, self.clip, self.clip_mode = flat, beta, clip, clip_mode
        self.vector = flat.zeros()
        self.norm = torch.zeros((), dtype=torch.float64, device=flat.device)
        """‖m‖₂ after the last step; computed only if clip or gap penalty need it."""
        self.clipped = torch.zeros((), dtype=torch.float64, device=flat.device)
        """Share of the elements that the last step clipped; 1 or 0 if it clips by norm."""

    def step(self, mean: Callable[[Part], Tensor], gap: GapPenalty) -> None:
        """Do one step with d, of which `mean` returns one chunk of `flat` at a time, each once."""
        by_value = self.clip if self.clip_mode == "value" else None
        by_norm = self.clip if self.clip_mode == "norm" else None
        norms: list[Tensor] = []
        clipped = torch.zeros_like(self.norm)
        for chunk in self.flat.chunks:
            m, d = chunk.of(self.vector), mean(chunk).to(self.flat.dtype)
            if gap.kind == "none":
                m.mul_(self.beta).add_(d)
            else:
                penalty = gap.divisor(m)
                m.mul_(self.beta).addcdiv_(d, penalty)
            if by_value is not None:
                # Counted as floats, which is faster.
                clipped.add_(m.abs().gt_(by_value).sum(), alpha=chunk.share)
                m.clamp_(-by_value, by_value)
            if by_norm is not None or gap.measures:
                found = row_norms(m)
                if chunk.share != 1:
                    torch._foreach_mul_(found, chunk.share**0.5)
                norms += found
        squares = squared_norm(torch.cat(norms)) if norms else torch.zeros_like(self.norm)
        if self.clip is not None or gap.measures:
            squares, clipped = self.flat.total(squares, clipped)
        self.norm = squares.sqrt()
        self.clipped = clipped / self.flat.total_numel
        if by_norm is not None:
            self._clip_norm(by_norm)

    def _clip_norm(self, bound: float) -> None:
        tiny = torch.finfo(torch.float64).tiny
        factor = (bound / self.norm.clamp(min=tiny)).clamp(max=1.0)
        for chunk in self.flat.chunks:
            chunk.of(self.vector).mul_(factor.to(self.flat.dtype))
        self.norm = self.norm * factor
        self.clipped = (factor < 1).double()


def nesterov(x: Tensor, v: Tensor, d: Tensor, outer_lr: float, outer_momentum: float) -> None:
    """Do one step of SGD with Nesterov momentum, in place: v ← β v + d; x ← x − α (d + β v)."""
    v.mul_(outer_momentum).add_(d)
    x.sub_(d, alpha=outer_lr).sub_(v, alpha=outer_lr * outer_momentum)
