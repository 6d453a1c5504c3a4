"""1-bit Adam (Tang et al., ICML 2021, arXiv 2102.02888, Algorithm 1). Blocking.

    step t = 1 … freeze_step: Adam with averaged gradients
        g = mean_i g^i;  m ← β1 m + (1−β1) g;  v ← β2 v + (1−β2) g²
    after it, v stands still and the momentum travels, one bit an element (compressed_mean.py)
        m^i = β1 m + (1−β1) g^i;  m = 1-bit mean of m^i
    always  x ← x − γ m̂/(√v̂ + ε),  m̂ = m/(1−β1^t),  v̂ = v/(1−β2^min(t, freeze_step))

This method takes the place of the inner Adam or AdamW: γ, β1, β2, ε and weight decay are those of
each of its parameter groups; the paper's β1 and β2 are 0.9 and 0.999. All replicas hold the same x,
m and v after every step.
Chosen here:
- The bias corrections are PyTorch's, so that the first stage is AllReduce under AdamW. That of m
  goes on after the freeze (it is soon 1), that of v stays as it was then.
- Every parameter tensor has a scale of its own, where the paper has one scale for all
  (co2/comm/compressed_mean.py says why).
- Elements whose frozen v is 0, or next to nothing beside their tensor's, have a momentum of 0 from
  then on, and move by weight decay alone (the mask, compressed_adam.py). The authors' code has a
  mask too, which users fill in by hand.
- `compress: update` sends the signs of m/(√v + ε), and multiplies by √v + ε on arrival. That is not
  the paper's; results/tables/zero_one_training.md compares the two.
"""

from dataclasses import dataclass

import torch

from co2.methods.shared.compressed_adam import CompressedAdam, CompressedAdamConfig


class OneBitAdam(CompressedAdam):
    equal_weights = True

    @dataclass
    class Config(CompressedAdamConfig):
        """The paper freezes v after 15 to 20 % of training."""

    @torch.no_grad()
    def update(self) -> None:
        frozen = self.steps > self.config.freeze_step
        self.flat.gradients(out=self.mean.buffer)
        if not frozen:
            self.average_gradients()
        self._take_in_gradients(frozen)
        if frozen:
            self.average_signs(self.m)
        self._move()
        if self.steps == self.config.freeze_step:
            self.set_mask()
            self.mask_is_new = True

    def _take_in_gradients(self, frozen: bool) -> None:
        for chunk in self.flat.chunks:
            first, second = self.betas(chunk.group)
            g = chunk.of(self.mean.buffer)
            self.add_l2(chunk, g)
            chunk.of(self.m).lerp_(g, 1 - first)
            if not frozen:
                chunk.of(self.v).mul_(second).addcmul_(g, g, value=1 - second)

    def _move(self) -> None:
        refreshes = min(self.steps, self.config.freeze_step)
        for chunk in self.flat.chunks:
            first, second = self.betas(chunk.group)
            x = chunk.read()
            x.mul_(self.shrinkage(chunk.group))
            divisor = self.divisor(chunk, 1 - second**refreshes)
            gamma = self.lr(chunk.group) / (1 - first**self.steps)
            x.addcdiv_(chunk.of(self.m), divisor, value=-gamma)
            chunk.write(x)

    def loaded(self) -> None:
        if self.steps >= self.config.freeze_step:
            self.set_mask()
