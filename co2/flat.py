"""FlatParams: the trained parameters of one worker as one contiguous vector."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import record_function

from co2.trace import SNAPSHOT

# Elements that one pass of arithmetic touches before it goes on, so that several operations on
# the same elements meet them in cache. On a GPU launches cost more than the cache saves.
_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 22}


@dataclass(frozen=True)
class Chunk:
    """Consecutive elements of the flat vector, all of one parameter group."""

    span: slice
    group: int
    live: tuple[Tensor, ...]
    """Views of the parameters that lie in the span, in order and without gaps."""

    @property
    def numel(self) -> int:
        return self.span.stop - self.span.start

    def of(self, vector: Tensor) -> Tensor:
        """This chunk of a flat vector, as a view."""
        return vector[self.span]

    def read(self, out: Tensor) -> None:
        """Live parameters → `out`, which is this chunk of some vector."""
        torch._foreach_copy_(self._views(out), list(self.live))

    def write(self, values: Tensor) -> None:
        """`values`, which is this chunk of some vector → live parameters."""
        torch._foreach_copy_(list(self.live), self._views(values))

    def _views(self, values: Tensor) -> list[Tensor]:
        parts = values.split([live.numel() for live in self.live])
        return [part.view(live.shape) for part, live in zip(parts, self.live, strict=True)]


class FlatParams:
    """The parameters that an optimizer trains, seen as one vector.

    Vectors of this shape are copies, never aliases: a collective on one cannot touch a live
    parameter. Order: parameter groups, then parameters as the group lists them; a tied parameter
    counts once; what does not require a gradient is left out. The element type is fp32, or fp64
    where a parameter is. Parameters must stay where they are: moving the model makes it stale.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.params: list[Tensor] = []
        self.group_of: list[int] = []
        self._owners: list[Tensor] = []
        seen: set[int] = set()
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if param.requires_grad and id(param) not in seen:
                    seen.add(id(param))
                    self._owners.append(param)
                    self.params.append(param.detach())
                    self.group_of.append(index)
        if not self.params:
            raise ValueError("the optimizer holds no parameter that requires a gradient")
        self.numel = sum(param.numel() for param in self.params)
        self.device = self.params[0].device
        self.dtype = torch.float32
        for param in self.params:
            self.dtype = torch.promote_types(self.dtype, param.dtype)
        self.chunks = list(self._cut(_CHUNK.get(self.device.type, 1 << 22)))
        longest = max(chunk.numel for chunk in self.chunks)
        self.scratch = torch.empty(longest, dtype=self.dtype, device=self.device)

    def zeros(self) -> Tensor:
        """A new vector (numel,) of zeros."""
        return torch.zeros(self.numel, dtype=self.dtype, device=self.device)

    def copy(self) -> Tensor:
        """A new vector (numel,) that holds the live parameters."""
        vector = torch.empty(self.numel, dtype=self.dtype, device=self.device)
        for chunk in self.chunks:
            chunk.read(chunk.of(vector))
        return vector

    def local(self, chunk: Chunk) -> Tensor:
        """The live parameters of a chunk, in scratch that the next call overwrites."""
        values = self.scratch[: chunk.numel]
        chunk.read(values)
        return values

    def displacement(self, start: Tensor, out: Tensor) -> None:
        """out ← start − live: the pseudo-gradient of the steps since `start`, rounded to out's
        type."""
        with record_function(SNAPSHOT):
            for chunk in self.chunks:
                torch.sub(chunk.of(start), self.local(chunk), out=chunk.of(out))

    def gradients(self, out: Tensor) -> None:
        """out ← the gradients; zeros where a parameter has none."""
        parts = out.split([param.numel() for param in self.params])
        for owner, part in zip(self._owners, parts, strict=True):
            if owner.grad is None:
                part.zero_()
            else:
                part.view(owner.shape).copy_(owner.grad)

    def write(self, vector: Tensor) -> None:
        """Live parameters ← vector."""
        for chunk in self.chunks:
            chunk.write(chunk.of(vector))

    def _cut(self, size: int) -> Iterator[Chunk]:
        """Chunks of at most `size` elements; only a non-contiguous parameter may exceed it."""
        start, used, group = 0, 0, 0
        live: list[Tensor] = []
        for param, index in zip(self.params, self.group_of, strict=True):
            pieces = param.view(-1).split(size) if param.is_contiguous() else (param,)
            for piece in pieces:
                if live and (index != group or used + piece.numel() > size):
                    yield Chunk(slice(start, start + used), group, tuple(live))
                    start, used, live = start + used, 0, []
                group = index
                live.append(piece)
                used += piece.numel()
        yield Chunk(slice(start, start + used), group, tuple(live))
