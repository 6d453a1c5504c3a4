"""CompressedAdam: what the two 1-bit variants of Adam have in common.

Both take the place of the inner Adam: they read its parameter groups (lr, betas, eps, weight decay)
but never call its step. Moments and errors are flat vectors, in the order of FlatParams. The mean
of the x^i is the consensus: nothing is under way between two steps, and errors have moved no
weights.
"""

from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from co2.comm.codec import BITS
from co2.comm.compressed_mean import CompressedMean
from co2.comm.cuts import segmented
from co2.comm.flat import FlatParams, chunk_numel
from co2.comm.transfer import Chunk
from co2.errors import require
from co2.limits import Amount, Count, Limited
from co2.methods.base import BF16, HOST, Method

_SAMPLE = 1 << 16
"""Elements of a tensor, evenly spread, whose median stands for that of all, at most."""
_NAMED = 5
"""Tensors that a notice names at most."""


class Compress(Enum):
    """Whose signs travel."""

    momentum = "momentum"
    """The momentum's, or those of the sum of momenta: as in the papers."""
    update = "update"
    """Those of the same divided by √v + ε, which all replicas share, and multiplied on arrival: a
    sign then stands for a step of the length that is usual in its tensor. Not in the papers."""


@dataclass
class CompressedAdamConfig(Limited):
    freeze_step: Count = 100
    """Steps after which v stands still. Too early, v is not what it will be
    (recipes/signs/zero_one_training.py)."""
    compress: Compress = Compress.momentum
    """Whose signs travel: the momentum's, as in the papers, or the update's."""
    mask_below: Amount = 0.01
    """Elements whose v lies below this share of their tensor's median v take no part in compressed
    exchanges of momentum."""


class CompressedAdam(Method):
    """Adam whose replicas exchange signs. A subclass sets `Config`, which extends
    `CompressedAdamConfig`, and `blocking`, and implements `step()`; it calls `set_mask` where it
    has changed v for compressed exchanges to come. If it holds more than m and v, it makes that in
    `set_up` and names it by `hold`.

    The mask. A sign is never 0, and stands for the root mean square of its tensor. An element whose
    √v is a thousandth of the others' would make steps a thousand times too long: one with a
    gradient of rounding errors alone, like a bias before a normalization or those of keys in
    attention, or a token that has hardly occurred. Such elements are not moved by compressed
    updates: they do not count for the scales, and their mean and errors are 0. The masked elements
    are those with v = 0 and, where momentum travels, those with v < `mask_below` · the median of
    the v above 0 of their tensor (of 65,536 elements of it, evenly spread).
    """

    reads_gradients = True
    rounds = 0
    """How many times the replicas have exchanged anything."""

    def refusals(self) -> dict[str, str]:
        parts = "its scales are of whole tensors, not of parts; use ddp"
        place = "it takes the inner optimizer's place, which has no state to share; use ddp"
        return {
            **super().refusals(),
            **{f"mesh.strategy={strategy}": parts for strategy in ("zero2", "zero3")},
            "mesh.strategy=zero1": place,
            **dict.fromkeys(("optim.name=sgd", "optim.name=muon"), "is a kind of Adam; use adamw"),
            BF16: "sends signs, and some steps whole; use fp32",
            HOST: "updates the model at every step, where it is; use auto",
        }

    def set_up(self) -> nn.Module:
        """Raises `ConfigError` for an optimizer other than plain Adam or AdamW."""
        kind = type(self.optimizer)
        adam = kind in (Adam, AdamW)
        require(adam, "optim.name", kind.__name__, f"{self.registered_name()} needs adamw")
        for group in self.optimizer.param_groups:
            plain = not group["amsgrad"] and not group["maximize"]
            hint = f"{self.registered_name()} takes no amsgrad and no maximize"
            require(plain, "optim.name", kind.__name__, hint)
        self.keep(self, "rounds")
        self.flat = flat = FlatParams(self.optimizer)
        self.mean = self.new_mean(flat)
        self._sizes = sizes = [param.numel() for param in flat.params]
        self.exchange = CompressedMean(sizes, self.mesh, self.mean, BITS["sign"], masked=True)
        self.m, self.v = self.hold("m", flat.zeros()), self.hold("v", flat.zeros())
        errors = self.exchange.errors()
        for name, tensor in self.exchange.state_tensors().items():
            # Nothing is in flight between steps, and the mask follows from v.
            self.hold(name, tensor, saved=name in errors)
        self.mask_is_new = False
        """Whether the next notice has to tell of the mask."""
        self._divisor = flat.transfer.empty(max(chunk.numel for chunk in flat.chunks))
        some = [size for size in sizes if size]
        self._parts = segmented(some, chunk_numel(flat.device))
        strides = [-(-size // _SAMPLE) for size in some]
        samples = zip(accumulate(some[:-1], initial=0), some, strides, strict=True)
        self._samples = torch.tensor([*samples], device=flat.device)
        """Of each tensor that has any elements: where the first is, how many it has, and how far
        apart those are whose median stands for that of all."""
        return self.model

    def average_gradients(self) -> None:
        """Replace this replica's gradients, in the communication buffer, by the replicas' mean."""
        self.mean.mean_now()
        self.rounds += 1

    def average_signs(self, vector: Tensor) -> None:
        """Replace a vector (numel,) by its 1-bit mean over the replicas, and by 0 where the mask
        is."""
        update = self.config.compress is Compress.update
        if update:
            for chunk in self.flat.chunks:
                chunk.of(vector).div_(self._root(chunk))
        self.exchange.start(vector)
        self.mean.wait()
        if update:
            for chunk in self.flat.chunks:
                chunk.of(vector).mul_(self._root(chunk))
        self.rounds += 1

    def set_mask(self) -> None:
        """Set the mask by v as it is now. Overwrites the communication buffer."""
        marks = torch.sign(self.v, out=self.mean.buffer)
        if self.config.compress is Compress.momentum:
            floors = self._medians().mul_(self.config.mask_below)
            for part in self._parts:
                part.of(marks).mul_(part.of(self.v) >= part.of_elements(floors))
        self.exchange.set_mask(marks)

    def _medians(self) -> Tensor:
        """Return the median of the v above 0 of each tensor with elements; NaN where there are
        none. The host does not wait."""
        most = min(_SAMPLE, max(self._sizes))
        found = []
        for some in self._samples.split(max(1, chunk_numel(self.v.device) // most)):
            first, size, stride = some.unsqueeze(2).unbind(1)
            at = torch.arange(most, device=size.device) * stride
            inside = at < size
            sample = self.v[first + at.where(inside, 0)]
            sample = sample.where(inside & (sample > 0), torch.nan)
            found.append(sample.nanmedian(dim=1).values)
        return torch.cat(found)

    def notices(self) -> list[str]:
        if self.mask_is_new:  # counted here, for the host waits
            self.mask_is_new = False
            self._notices.append(self._mask_in_words())
        return super().notices()

    def _mask_in_words(self) -> str:
        """How many elements of which tensors are masked."""
        assert self.exchange.mask is not None
        counts = [
            part.count_nonzero()
            for vector in (self.v, self.exchange.mask)
            for part in vector.split(self._sizes)
        ]
        seen, alive = torch.stack(counts).view(2, -1).tolist()  # the host waits once
        small = [count - left for count, left in zip(seen, alive, strict=True)]
        found = sorted(zip(small, self.tensor_names(), strict=True), reverse=True)
        named = [f"{name} ({count:,})" for count, name in found if count]
        if len(named) > _NAMED:
            named = [*named[:_NAMED], f"{len(named) - _NAMED} more tensors"]
        of = f"of {self.flat.numel:,} elements"
        parts = [f"{self.flat.numel - sum(seen):,} {of} have no gradient yet"]
        if self.config.compress is Compress.momentum:
            where = f": {', '.join(named)}" if named else ""
            share = f"{self.config.mask_below:g} of their tensor's median"
            parts.append(f"{sum(small):,} have a variance below {share}{where}")
        return f"variance frozen; compressed updates leave alone: {'; '.join(parts)}"

    def tensor_names(self) -> list[str]:
        """The names of the trained parameters, in the order of the vectors."""
        names = {id(weight): name for name, weight in self.model.named_parameters()}
        return [names[key] for key in dict.fromkeys(map(id, self._trained()))]

    def betas(self, group: int) -> tuple[float, float]:
        """β1 and β2 of a parameter group."""
        first, second = self.optimizer.param_groups[group]["betas"]
        return float(first), float(second)

    def shrinkage(self, group: int) -> float:
        """The factor by which AdamW's weight decay shrinks weights in this step; 1 for Adam."""
        settings = self.optimizer.param_groups[group]
        decoupled = settings["decoupled_weight_decay"]
        return 1 - self.lr(group) * settings["weight_decay"] if decoupled else 1.0

    def add_l2(self, chunk: Chunk, gradient: Tensor) -> None:
        """Add Adam's weight decay to a gradient, which it is a part of. AdamW: add nothing."""
        settings = self.optimizer.param_groups[chunk.group]
        if settings["weight_decay"] and not settings["decoupled_weight_decay"]:
            gradient.add_(chunk.read(), alpha=settings["weight_decay"])

    def divisor(self, chunk: Chunk, correction: float = 1.0) -> Tensor:
        """Return √(v/correction) + ε, in scratch that the next call overwrites; infinity if v = 0.

        An element with v = 0 has had no gradient yet, a token that has not occurred for example. A
        sign cannot stand for 0, and divided by ε alone it would be a huge step. So the element does
        not move and takes no part in exchanges as long as its v is 0.
        """
        still = chunk.of(self.v) == 0
        return self._root(chunk, correction).masked_fill_(still, float("inf"))

    def _root(self, chunk: Chunk, correction: float = 1.0) -> Tensor:
        out = self._divisor[: chunk.numel]
        torch.sqrt(chunk.of(self.v), out=out)
        eps = self.optimizer.param_groups[chunk.group]["eps"]
        if correction != 1:
            out.div_(correction**0.5)
        return out.add_(eps)

    def scratch_tensors(self) -> list[Tensor]:
        return [*self.flat.transfer.scratch_tensors(), self._divisor]

    def figures(self) -> dict[str, float]:
        return {"rounds": float(self.rounds)}
