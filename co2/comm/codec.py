"""Compressors: one to eight bits for each element, and a scale for all of them.

    sign   C(x) = s·sign(x), sign(0) = +1     s = ‖x‖₂/√n         (1-bit Adam, arXiv 2102.02888)
    int4   C(x) = s·round(x/s)                s = max|x|/7
    int8   C(x) = s·round(x/s)                s = max|x|/127

One scale covers one segment: a parameter tensor, or the part of it that a server owns
(compressed_mean.py). A `Codec` compresses a vector of many segments at once. On CUDA Triton's
kernels do it (kernels.py), in one launch. Elsewhere PyTorch does, piece by piece, and the number of
calls depends on the elements alone, not on the segments. Both make the same bits.
Scales stay on the device of x, so that the host never waits for a GPU.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, pairwise
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from co2.comm.cuts import SegmentedPart, part_between

_PIECE = 1 << 20
"""Elements that PyTorch works on at a time, which bounds the temporaries."""


def kernels(x: Tensor) -> ModuleType | None:
    """Return co2/comm/kernels.py for a vector on CUDA, and under Triton's interpreter for any; None
    where PyTorch has to do, also because Triton is not installed."""
    return _kernels() if x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1" else None


@cache
def _kernels() -> ModuleType | None:
    # Imported late: `import co2` needs torch and numpy only.
    return import_module("co2.comm.kernels") if find_spec("triton") else None


BITS = {"sign": 1, "int4": 4, "int8": 8}
"""Bits of a code of each compressor."""


class Scales:
    """The scales of the segments of a vector, in as many calls whatever their number.

    Args:
        bits: of a code of C.
        sizes: elements of the segments, in their order, which make up the vector.
        like: a tensor on the vector's device and of its type.
    """

    def __init__(self, bits: int, sizes: Sequence[int], like: Tensor) -> None:
        self._bits, self._order = bits, 2.0 if bits == 1 else math.inf
        self._divide_by(like.new_tensor(sizes))
        # So short that sums of fp32 stay exact enough.
        pieces = [
            [min(_PIECE, size - start) for start in range(0, size, _PIECE)] or [0] for size in sizes
        ]
        self._sizes = [piece for own in pieces for piece in own]
        ends = list(accumulate(map(len, pieces), initial=0))
        most = max(map(len, pieces), default=0)
        # Where a segment has fewer pieces than another, a norm of 0 is behind all others.
        rows = [[*range(*span), *[ends[-1]] * most][:most] for span in pairwise(ends)]
        self._pieces = torch.tensor(rows, dtype=torch.int64, device=like.device)
        self._none = like.new_zeros(())

    def of(self, x: Tensor) -> Tensor:
        """Return the scales (segments,) of a vector."""
        return self._norms(x, self._order).div_(self._divisors)

    def count(self, marks: Tensor) -> None:
        """Let only those elements count where `marks`, of the vector's type, is 1, not 0."""
        self._divide_by(self._norms(marks, 1.0).clamp_(min=1))

    def _divide_by(self, counts: Tensor) -> None:
        one_bit, largest = self._bits == 1, _largest(self._bits)
        self._divisors = counts.sqrt() if one_bit else torch.full_like(counts, largest)

    def _norms(self, x: Tensor, order: float) -> Tensor:
        """BLAS would add in an order that depends on the address of x, so that a resumed run might
        differ."""
        if not self._sizes:
            return x.new_zeros(0)
        norms = torch._foreach_norm(x.split(self._sizes), order)
        together = torch.stack([*norms, self._none])
        return torch.linalg.vector_norm(together[self._pieces], order, dim=1)


class Codec:
    """Compresses a vector, and reads what others have made of theirs.

    The vector has rows of `width` elements, of which the last may be shorter. Each is packed into
    bytes of its own; byte j holds the codes j·8/bits, j·8/bits + 1, …, from its lowest bits on.

    Args:
        bits: of a code of C.
        sizes: elements of the segments, at least 1 each, in their order. They make up the vector,
            and none is in two rows.
        width: elements of a row.
        messages: how many messages `add` reads at a time.
        like: a tensor on the vector's device and of its type.
    """

    def __init__(
        self, bits: int, sizes: Sequence[int], width: int, like: Tensor, messages: int = 1
    ) -> None:
        self.bits, self.width = bits, width
        self.row_bytes = -(-width * bits // 8)
        self.starts = torch.tensor([0, *accumulate(sizes)], device=like.device)[:-1]
        """The first element of each segment."""
        self._codes_per_byte, largest = 8 // bits, _largest(bits)
        # The last code of several bits does not occur.
        levels = [-1, 1] if bits == 1 else [*range(-largest, largest + 1), 0]
        every = torch.arange(256, device=like.device).unsqueeze(1)
        codes = every >> torch.arange(0, 8, bits, device=like.device) & (len(levels) - 1)
        self._levels = torch.tensor(levels, dtype=torch.int8, device=like.device)[codes]
        """(256, 8/bits): byte → the values C(x)/s that its codes stand for."""
        self._blocks = list(blocks(sizes, width, self._codes_per_byte, _PIECE // messages))

    def encode(
        self, x: Tensor, scales: Tensor, mask: Tensor | None, out: Tensor, error: Tensor
    ) -> None:
        """Write the codes of x to `out`, and x − C(x) to `error`.

        Args:
            x: (numel,).
            scales: s of each segment.
            mask: (numel,), of Booleans. Where it is false, x is 0 and C(x) counts as 0. None: it is
                true everywhere.
            out: (rows, row_bytes), uint8; rows need not be adjacent.
            error: (numel,).
        """
        if fused := kernels(x):
            fused.encode(self, x, scales, mask, out, error)
            return
        for block in self._blocks:
            part, s = block.rows_of(x), block.of_elements(scales)
            codes = self._codes(block.of(x), s).view_as(part)
            codes = pad(codes, (0, -block.width % self._codes_per_byte))
            packed, *others = codes.view(len(part), -1, self._codes_per_byte).unbind(2)
            for number, other in enumerate(others, start=1):
                packed = packed.add(other, alpha=2 ** (number * self.bits))
            out[block.rows, block.packed] = packed.to(torch.uint8)
            values = block.rows_of(error)
            self._write(packed, s, mask, block, values)
            torch.sub(part, values, out=values)

    def decode(self, packed: Tensor, scales: Tensor, mask: Tensor | None, out: Tensor) -> None:
        """Write C(x) to `out` (numel,). The others are as in `encode`."""
        if fused := kernels(out):
            fused.decode(self, packed, scales, mask, out)
            return
        for block in self._blocks:
            codes, s = packed[block.rows, block.packed], block.of_elements(scales)
            self._write(codes, s, mask, block, block.rows_of(out))

    def add(self, packed: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the sum of the C(x) of several vectors of a single row to `out` (numel,), added
        in their order.

        Args:
            packed: (messages, row_bytes), uint8; rows need not be adjacent.
            scales: (messages, segments).
        """
        if fused := kernels(out):
            fused.add(self, packed, scales, out)
            return
        for block in self._blocks:
            values = self._values(packed[:, block.packed], block.width)
            total = block.of(out).zero_()
            for one in values * block.of_elements(scales):
                total.add_(one)

    def _codes(self, x: Tensor, s: Tensor) -> Tensor:
        """Return the codes of x (k,): whole numbers (k,) from 0 to 2^bits − 1, in the type of x.

        Args:
            s: (k,), or (1,) for all elements.
        """
        if self.bits == 1:
            return (x >= 0).to(x.dtype)
        largest, multiples = _largest(self.bits), torch.div(x, s.where(s > 0, 1)).round_()
        # An s close to 0 is rounded so coarsely that max|x| may be more multiples of it.
        return multiples.clamp_(-largest, largest).add_(largest)

    def _values(self, packed: Tensor, width: int) -> Tensor:
        """Return C(x)/s (rows, width), int8, of bytes (rows, bytes), given in any type."""
        values = self._levels.index_select(0, packed.int().reshape(-1))
        return values.view(len(packed), -1)[:, :width]

    def _write(
        self, packed: Tensor, s: Tensor, mask: Tensor | None, block: "Block", out: Tensor
    ) -> None:
        """Write C(x) of the bytes of a block to `out` (rows, width)."""
        values = self._values(packed, block.width)
        torch.mul(values, s if len(s) == 1 else s.view(out.shape), out=out)
        if mask is not None:
            out.mul_(block.rows_of(mask))


def _largest(bits: int) -> int:
    """The most multiples of s that a code stands for."""
    return 2 ** (bits - 1) - 1


@dataclass(frozen=True, kw_only=True)
class Block(SegmentedPart):
    """Elements that are packed together: whole rows, or a part of one."""

    rows: slice
    width: int
    """How many of them are in each of these rows."""
    packed: slice
    """Their bytes, as a slice of each row's."""

    def rows_of(self, vector: Tensor) -> Tensor:
        """Return the elements of a vector, as a view (rows, width)."""
        return self.of(vector).view(-1, self.width)


def blocks(sizes: Sequence[int], width: int, multiple: int, piece: int) -> Iterator[Block]:
    """Yield the blocks of a vector: of whole rows, of at most `piece` elements, or of parts of a
    single row, a multiple of `multiple` wide."""
    starts = list(accumulate(sizes, initial=0))
    numel = starts.pop()
    most = max(multiple, piece - piece % multiple)
    rows_at_once = max(1, most // (width + -width % multiple))
    whole_rows = numel // width
    together = [*range(0, whole_rows, rows_at_once), whole_rows]
    for first, last in [*pairwise(together), (whole_rows, whole_rows + 1)]:
        whole = min(width, numel - first * width)
        for column in range(0, whole, most):
            count = min(most, whole - column)
            begin = first * width + column
            part = part_between(starts, begin, begin + (last - first - 1) * width + count)
            packed = slice(column // multiple, -(-(column + count) // multiple))
            rows = slice(first, last)
            yield Block(**vars(part), rows=rows, width=count, packed=packed)
