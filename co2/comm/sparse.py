"""The mean over the replicas of their largest elements, at 14 bits each, with error feedback.

    replica i:  e^i ← β e^i + x^i
                s^i = Q(TopK of each chunk of e^i);  e^i ← e^i − s^i
    all:        mean_i s^i, added up from everybody's message in the order of the ranks

A chunk has 4,096 consecutive elements of one parameter tensor, and the last one of a tensor has the
rest. Of every chunk the same share is kept. All messages have the same length, so one all-gather
brings each to every replica, and what they add up is bit for bit the same. (SparseLoCo, arXiv
2508.15706.)

A message holds, for each block of chunks: two magnitudes for each chunk, 2 bits for each value that
was kept, and 12 bits for its index in the chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from co2.comm.background import BackgroundMean
from co2.comm.compress import num_bytes, pack, unpack
from co2.comm.mesh import Mesh

CHUNK = 4096
"""Elements of a chunk. Indices of 12 bits reach no further."""
_PIECE = 1 << 20
"""Elements of a block at most, which bounds the temporaries. It must be equal on all workers, and a
multiple of `CHUNK`."""


class SparseMean:
    """Takes sparse means of one vector after another. A `BackgroundMean` carries them.

    Args:
        sizes: the numbers of elements of the tensors that make up the vector, in its order.
        mesh: the replicas. A single replica drops and rounds too, but sends nothing.
        mean: carries the messages over its process group. The vector has the type and the device of
            its buffer.
        density: the share of each chunk that is kept, in (0, 1]; at least one element is.
        decay: β.
        quantize: whether values have 2 bits; otherwise they travel whole, in the buffer's type.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        mesh: Mesh,
        mean: BackgroundMean,
        density: float,
        decay: float,
        quantize: bool = True,
    ) -> None:
        like, self.num_replicas = mean.buffer, mesh.num_replicas
        self._mean, self._decay = mean, decay
        self._values: Values = TwoBits() if quantize else Whole()
        self._blocks = _blocks(sizes, density, self._values, like.dtype)
        self.error = torch.zeros_like(like)
        self._sent = like.new_zeros(self._blocks[-1].indices.stop, dtype=torch.uint8)
        self._received = self._sent.new_zeros(mesh.num_replicas, self._sent.numel())

    def start(self, vector: Tensor) -> None:
        """Launch `mean_` in the background. The vector belongs to it until somebody has waited for
        the `BackgroundMean`."""
        self._mean.run(lambda: self.mean_(vector), self.bytes_per_mean())

    def mean_(self, vector: Tensor) -> None:
        """Overwrite vector (numel,) with its sparse mean, which all replicas share. Blocking."""
        self.error.mul_(self._decay).add_(vector)
        for block in self._blocks:
            self._pack(block)
        self._gather()
        vector.zero_()
        for message in self._received:
            for block in self._blocks:
                self._add(block, message, vector)
        vector.div_(self.num_replicas)

    def bytes_per_mean(self) -> int:
        """Bytes that one worker sends for one mean: around a ring, a message to each other one."""
        return (self.num_replicas - 1) * self._sent.numel()

    def messages(self) -> dict[str, Tensor]:
        """What travels; between two means it is not needed."""
        return {"sent": self._sent, "received": self._received}

    def _pack(self, block: "Block") -> None:
        """Move the largest elements of a block's errors to the message."""
        error = block.rows(self.error)
        at = largest(error.abs(), block.kept)
        packed = self._sent[block.values]
        self._values.write(error.gather(1, at), packed)
        pack_indices(at.view(-1), self._sent[block.indices])
        error.scatter_add_(1, at, self._values.read(packed, at.shape, error.dtype).neg_())

    def _add(self, block: "Block", message: Tensor, out: Tensor) -> None:
        """Add what a message says of a block to the block's elements of `out`."""
        rows = block.rows(out)
        at = unpack_indices(message[block.indices], len(rows) * block.kept).view(-1, block.kept)
        rows.scatter_add_(1, at, self._values.read(message[block.values], at.shape, out.dtype))

    def _gather(self) -> None:
        if self.num_replicas == 1:
            self._received.copy_(self._sent)
        else:
            flat = self._received.view(-1)
            dist.all_gather_into_tensor(flat, self._sent, group=self._mean.group)


class Values(Protocol):
    """How the kept values of some chunks travel."""

    def num_bytes(self, chunks: int, kept: int, dtype: torch.dtype) -> int:
        """Return the bytes of `kept` values of each chunk, of the type `dtype`."""

    def write(self, values: Tensor, out: Tensor) -> None:
        """Write values (chunks, kept) into `out` (num_bytes,), uint8."""

    def read(self, packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the values (chunks, kept) that `write` has put there, as a new tensor."""
        ...


class TwoBits:
    """A sign and one of two magnitudes.

    Of the sizes of a chunk's values, the lower magnitude is the mean of those below their common
    mean, and the higher one is the mean of the others; both have the type bf16. So values that are
    0, in a chunk with few others, stay 0 or close to it, and Q(v) is never further from v than 0 is
    but for the rounding to bf16.
    """

    def num_bytes(self, chunks: int, kept: int, dtype: torch.dtype) -> int:
        return 4 * chunks + num_bytes(chunks * kept, 2)

    def write(self, values: Tensor, out: Tensor) -> None:
        sizes = values.abs()
        high = sizes >= sizes.mean(dim=1, keepdim=True)
        magnitudes = torch.stack([_mean_where(~high, sizes), _mean_where(high, sizes)], dim=1)
        head = 4 * len(values)
        out[:head].copy_(magnitudes.bfloat16().view(-1).view(torch.uint8))
        pack((2 * high + (values < 0)).view(-1), 2, out[head:])

    def read(self, packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        head = 4 * shape[0]
        # Copied because a message is not aligned.
        magnitudes = packed[:head].clone().view(torch.bfloat16).view(-1, 2).to(dtype)
        codes = torch.empty(shape, dtype=torch.int64, device=packed.device)
        unpack(packed[head:], 2, codes.view(-1))
        found = magnitudes.gather(1, codes >> 1)
        return torch.where(codes & 1 == 1, -found, found)


class Whole:
    """The values as they are."""

    def num_bytes(self, chunks: int, kept: int, dtype: torch.dtype) -> int:
        return chunks * kept * dtype.itemsize

    def write(self, values: Tensor, out: Tensor) -> None:
        out.copy_(values.contiguous().view(-1).view(torch.uint8))

    def read(self, packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return packed.clone().view(dtype).view(*shape)


@dataclass(frozen=True)
class Block:
    """Chunks of the same width, one after another in one tensor, which are packed together."""

    span: slice
    """Their elements, as a slice of the vector."""
    width: int
    """Elements of a chunk."""
    kept: int
    """How many of them travel."""
    values: slice
    """The bytes of their values, as a slice of the message."""
    indices: slice
    """The bytes of their indices."""

    def rows(self, vector: Tensor) -> Tensor:
        """Return the block's elements of a vector as a view (chunks, width)."""
        return vector[self.span].view(-1, self.width)


def _blocks(
    sizes: Sequence[int], density: float, values: Values, dtype: torch.dtype
) -> list[Block]:
    found, begin, at = [], 0, 0
    for size in sizes:
        whole = size - size % CHUNK
        pieces = [(CHUNK, min(_PIECE, whole - done)) for done in range(0, whole, _PIECE)]
        pieces += [(size % CHUNK, size % CHUNK)] if size % CHUNK else []
        for width, numel in pieces:
            kept, chunks = num_kept(width, density), numel // width
            middle = at + values.num_bytes(chunks, kept, dtype)
            end = middle + num_bytes(chunks * kept, 12)
            span = slice(begin, begin + numel)
            found.append(Block(span, width, kept, slice(at, middle), slice(middle, end)))
            begin, at = begin + numel, end
    return found


def num_kept(width: int, density: float) -> int:
    """Return K, how many elements of a chunk of `width` elements are kept."""
    return max(1, round(density * width))


def largest(sizes: Tensor, kept: int) -> Tensor:
    """Return the indices (rows, kept), in ascending order, of the largest numbers of each row.

    Of equal numbers those with the smaller indices are taken. NaN counts as infinite, so that it
    travels and shows.

    Args:
        sizes: (rows, width), none below 0; changed in place.
    """
    sizes.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    least = sizes.topk(kept, dim=1).values[:, -1:]  # which of equal ones topk takes is not defined
    taken, equal = sizes > least, sizes == least
    room = kept - taken.sum(dim=1, keepdim=True)
    taken |= equal & (equal.cumsum(dim=1) <= room)
    # The host would wait for a GPU at `nonzero`. What is not taken goes to a last column.
    column = taken.cumsum(dim=1).sub_(1).masked_fill_(~taken, kept)
    index = torch.arange(sizes.shape[1], device=sizes.device).expand_as(sizes)
    return column.new_empty(len(sizes), kept + 1).scatter_(1, column, index)[:, :kept].contiguous()


def pack_indices(indices: Tensor, out: Tensor) -> None:
    """Write indices (k,) from 0 to 4,095 into `out` (num_bytes(k, 12),), uint8: first the lower 8
    bits of all, then the upper 4."""
    count = indices.numel()
    out[:count].copy_(indices & 255)
    pack(indices >> 8, 4, out[count:])


def unpack_indices(packed: Tensor, count: int) -> Tensor:
    """Return the indices (count,), int64, that `pack_indices` has put into `packed`."""
    indices = torch.empty(count, dtype=torch.int64, device=packed.device)
    unpack(packed[count:], 4, indices)
    return indices.bitwise_left_shift_(8).add_(packed[:count])


def _mean_where(some: Tensor, sizes: Tensor) -> Tensor:
    """Return the mean (rows,) of the sizes (rows, kept) for which `some` is true; 0 without any."""
    return (sizes * some).sum(dim=1) / some.sum(dim=1).clamp(min=1)
