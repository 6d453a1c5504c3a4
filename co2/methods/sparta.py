"""SPARTA (EXO Labs, 2025, openreview stFPf3gzq1): sparse parameter averaging. Waits beyond `delay`.

    after every inner step, for k = ⌈p n⌉ elements e that chance draws, the same on every replica i:
        x^i_e ← x^i_e + (mean_j s^j_e − s^i_e)      s: x as it was when it was sent

p → `share`, of the n elements that a worker holds. With `delay` d = 0 all wait for the mean, which
takes the place of x^i_e. With d ≥ 1 it arrives d steps later, and then the next elements are drawn,
so there is one exchange in every d steps and one is under way. No exchange changes the mean of the
replicas' weights, which is the consensus; it takes away differences. The inner optimizer may be
any; its state stays local and is kept.

Chosen here:
- The n elements are cut into k runs, whose lengths differ by one at most, and one element of each
  run is drawn. So none is drawn twice, and p = 1 draws all. With runs of w, an exchange without
  delay takes 1/w of the mean square of the replicas' differences, in expectation. In the authors'
  public code chance decides about each element by itself.
- The draw depends on the step alone and is made on the CPU, so that all replicas make the same.
On a GPU an exchange has a few launches for each tensor, because only what travels is touched.
"""

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from co2.comm.background_mean import BackgroundMean
from co2.comm.flat import FlatParams
from co2.limits import Limited, PartShare, Steps
from co2.methods.base import BF16, HOST, Method, synchronizing


class SPARTA(Method):
    may_change = frozenset({"delay"})

    @dataclass
    class Config(Limited):
        share: PartShare = 0.005
        """p, the share of the elements that travel at a time. The authors' public code: 0.005."""
        delay: Steps = 0
        """Inner steps that a mean may take without anybody waiting. From 1 on this is also the
        number of steps from one exchange to the next."""

    def refusals(self) -> dict[str, str]:
        return {
            **super().refusals(),
            BF16: "sends weights, of which bf16 loses the changes; use fp32",
            HOST: "updates the model where it is; use auto",
        }

    def set_up(self) -> nn.Module:
        self.flat = flat = FlatParams(self.optimizer)
        count = math.ceil(self.config.share * flat.numel)
        self.mean = self.send_by(
            BackgroundMean(count, self.mesh, self.comm, flat.dtype, flat.device)
        )
        self.sent = self.hold("sent", torch.zeros_like(self.mean.buffer))
        places = torch.zeros_like(self.sent, dtype=torch.int64)
        self.places = self.hold("places", places, replicated=True, saved=False)
        """Where the elements that travel lie, each within its own tensor. A resumed run draws them
        again."""
        self.spans: list[tuple[Tensor, slice]] = []
        """The tensors that have some of them, each with its part of `places`."""
        self.drawn_at = 0
        """The step that drew them; 0 before the first."""
        self.keep(self, "drawn_at")
        return self.model

    def update(self) -> None:
        self.inner_step()
        delay = self.config.delay
        if self.steps % max(1, delay) == 0:
            with synchronizing():
                self._take_in()
                self._draw(self.steps)
                self._gather(self.sent)
                self.mean.start(self.sent)
                if delay == 0:
                    self._take_in()

    def _draw(self, step: int) -> None:
        """Draw the elements to be sent after this step."""
        self.drawn_at = step
        numel, count = self.flat.numel, len(self.sent)
        begins = torch.arange(count + 1).mul_(numel).div_(max(1, count), rounding_mode="floor")
        generator = torch.Generator().manual_seed(step)
        places = torch.rand(count, generator=generator, dtype=torch.float64)
        places = places.mul_(begins.diff()).long().add_(begins[:-1])
        sizes = [param.numel() for param in self.flat.params]
        starts = torch.tensor([*accumulate(sizes, initial=0)])
        bounds = torch.searchsorted(places, starts)
        places.sub_(starts[:-1].repeat_interleave(bounds.diff(), output_size=count))
        if self.places.is_cuda:
            places = places.pin_memory()  # the host does not wait for the copy
        self.places.copy_(places, non_blocking=True)
        spans = (slice(*pair) for pair in pairwise(bounds.tolist()))
        found = zip(self.flat.params, spans, strict=True)
        self.spans = [(param, span) for param, span in found if span.start < span.stop]

    def _gather(self, out: Tensor) -> None:
        """Write the live values of the elements to out (k,)."""
        for param, span in self.spans:
            out[span].copy_(torch.take(param, self.places[span]))

    def _take_in(self) -> None:
        """Wait for the mean that was started last, if one was, and move the elements by it."""
        mean = self.mean.wait()
        if mean is None:
            return
        values = torch.empty_like(self.sent)
        self._gather(values)
        # In this order it is the mean itself, bit for bit, where no step has been since.
        values.sub_(self.sent).add_(mean)
        for param, span in self.spans:
            param.put_(self.places[span], values[span].to(param.dtype))

    def first_means(self) -> dict[str, int]:
        return {"weights": max(1, 2 * self.config.delay)}

    def scratch_tensors(self) -> list[Tensor]:
        return self.flat.transfer.scratch_tensors()

    def loaded(self) -> None:
        if self.drawn_at:
            self._draw(self.drawn_at)
