"""The mean over the replicas of their largest elements, at 14 bits each, with error feedback.

    replica i:  e^i ← β e^i + x^i
                s^i = Q(TopK of each chunk of e^i);  e^i ← e^i − s^i
    all:        mean_i s^i, added up from everybody's message in the order of the ranks

A chunk has 4,096 consecutive elements of one parameter tensor, and the last one of a tensor has the
rest. Of every chunk the same share is kept. All messages have the same length, so an all-gather
brings each to every replica, and what they add up is bit for bit the same. Where all that is
received would take more memory than the vector, there are several messages, one after the other.
(SparseLoCo, arXiv 2508.15706.)

Q keeps the sign of a value, and one of two magnitudes of its chunk. Of the sizes of the chunk's
values, the lower magnitude is the mean of those below their common mean, and the higher one is the
mean of the others; both have the type bf16. So values that are 0, in a chunk with few others, stay
0 or close to it, and Q(v) is never further from v than 0 is but for the rounding to bf16.

A message holds the magnitudes of all chunks; then a number of 14 bits for each value that was kept:
first the lower 8 bits of all, then their upper 6. The lower 12 bits are the value's index in the
chunk, the next says whether it is below 0, the last whether its magnitude is the higher one. On
CUDA Triton's kernels choose and add values (kernels.py), one chunk in each program; elsewhere
PyTorch does for many chunks at once.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from co2.comm.background_mean import BackgroundMean
from co2.comm.codec import kernels
from co2.comm.cuts import pack
from co2.comm.mesh import Mesh

CHUNK = 4096
"""Elements of a chunk. Indices of 12 bits reach no further."""
_SMALL = 1 << 24
"""Bytes of received messages for which there are no several."""
_PIECE = 1 << 20
"""Elements that PyTorch works on at a time, which bounds the temporaries."""


class SparseMean:
    """Takes sparse means of one vector after another. A `BackgroundMean` carries them.

    Args:
        sizes: the numbers of elements of the tensors that make up the vector, in its order.
        mesh: the replicas. A single replica drops and rounds too, but sends nothing.
        mean: carries the messages over its process group. The vector has the type and the device of
            its buffer.
        density: the share of each chunk that is kept, in (0, 1]; at least one element is.
        decay: β.
    """

    def __init__(
        self, sizes: Sequence[int], mesh: Mesh, mean: BackgroundMean, density: float, decay: float
    ) -> None:
        like, self.num_replicas = mean.buffer, mesh.num_replicas
        self._mean, self._decay = mean, decay
        self.error = torch.zeros_like(like)
        self._messages = list(_messages(sizes, density, like, mesh.num_replicas))
        length = self._messages[-1].span.stop
        self._sent = like.new_zeros(length, dtype=torch.uint8)
        longest = max(message.num_bytes for message in self._messages)
        self._received = self._sent.new_zeros(mesh.num_replicas * longest)

    def start(self, vector: Tensor) -> None:
        """Launch `mean_` in the background. The vector belongs to it until somebody has waited for
        the `BackgroundMean`."""
        self._mean.run(lambda: self.mean_(vector), self.bytes_per_mean())

    def mean_(self, vector: Tensor) -> None:
        """Overwrite vector (numel,) with its sparse mean, which all replicas share. Blocking."""
        self.error.mul_(self._decay).add_(vector)
        for message in self._messages:
            sent, error = self._sent[message.span], self.error[message.elements]
            message.write(sent, error)
            message.add(sent.unsqueeze(0), error, -1)
            received = self._received[: self.num_replicas * len(sent)].view(-1, len(sent))
            self._mean.exchange(dist.all_gather_into_tensor, received, sent)
            message.add(received, vector[message.elements].zero_(), 1)
        vector.div_(self.num_replicas)

    def bytes_per_mean(self) -> int:
        """Bytes that one worker sends for one mean: around a ring, a message to each other one."""
        return (self.num_replicas - 1) * self._sent.numel()

    def messages(self) -> dict[str, Tensor]:
        """What travels; between two means it is not needed."""
        return {"sent": self._sent, "received": self._received}


@dataclass(frozen=True)
class Message:
    """What a replica sends at once: that of some chunks."""

    chunks: "Chunks"
    elements: slice
    """Theirs, as a slice of the vector."""
    span: slice
    """Its bytes, as a slice of all that the replica sends."""

    @property
    def num_bytes(self) -> int:
        return self.span.stop - self.span.start

    @property
    def _lower(self) -> slice:
        begin = 4 * len(self.chunks.starts)
        return slice(begin, begin + self.chunks.total)

    @property
    def _upper(self) -> slice:
        begin = self._lower.stop
        return slice(begin, begin + 3 * -(-self.chunks.total // 4))

    def write(self, sent: Tensor, error: Tensor) -> None:
        """Put the largest of the errors (elements,) into the message (bytes,)."""
        chunks, kept = self.chunks, self.chunks.total
        numbers = chunks.starts.new_zeros(-(-kept // 4), 4)
        magnitudes = error.new_empty(len(chunks.starts), 2, dtype=torch.float32)
        choose = fused.choose if (fused := kernels(error)) else _choose
        choose(error, chunks, numbers.view(-1)[:kept], magnitudes)
        self._magnitudes(sent).copy_(magnitudes)
        sent[self._lower].copy_(numbers.view(-1)[:kept] & 255)
        fours = (numbers >> 8 << _shifts(numbers)).sum(1)
        sent[self._upper].view(-1, 3).copy_(fours.view(torch.uint8).view(-1, 8)[:, :3])

    def add(self, messages: Tensor, out: Tensor, sign: int) -> None:
        """Add what messages (messages, bytes) say to `out` (elements,), in their order, or subtract
        it."""
        chunks = self.chunks
        if fused := kernels(out):
            magnitudes = self._magnitudes(messages).to(out.dtype)
            lower, upper = messages[:, self._lower], messages[:, self._upper]
            fused.spread(lower, upper, magnitudes, chunks, out, sign)
            return
        for some in messages.split(max(1, _PIECE // chunks.total)):
            numbers = self._numbers(some)
            magnitudes = self._magnitudes(some).to(out.dtype) * sign
            of_chunks = torch.stack([magnitudes, -magnitudes], dim=3).view(len(some), -1)
            chunk = torch.repeat_interleave(chunks.kept, output_size=chunks.total)
            # The upper two bits say which of its chunk's four values it is.
            values = of_chunks.gather(1, 4 * chunk + (numbers >> 12))
            places = chunks.starts[chunk] + (numbers & (CHUNK - 1))
            add_in_order(out, places.view(-1), values.view(-1))

    def _numbers(self, messages: Tensor) -> Tensor:
        """Return the numbers (messages, kept) in messages (messages, bytes)."""
        threes = messages[:, self._upper].unflatten(1, (-1, 3))
        fours = pad(threes, (0, 1)).view(torch.int32)
        upper = (fours >> _shifts(fours) & 63).flatten(1)[:, : self.chunks.total]
        return messages[:, self._lower] + (upper << 8)

    def _magnitudes(self, messages: Tensor) -> Tensor:
        """Return the magnitudes (…, chunks, 2) in messages (…, bytes), as a view."""
        halves = messages.view(torch.bfloat16)[..., : 2 * len(self.chunks.starts)]
        return halves.unflatten(-1, (-1, 2))


def _messages(
    sizes: Sequence[int], density: float, like: Tensor, replicas: int
) -> Iterator[Message]:
    """Yield the messages of tensors of these sizes, which make up the vector `like`."""
    parts = [min(_PIECE, size - at) for size in sizes for at in range(0, size, _PIECE)]
    numel = sum(parts)
    several = num_messages(replicas * density * numel * 14 / 8, like.nbytes)
    element = byte = 0
    for some in pack(parts, -(-numel // several)):
        own = parts[some]
        chunks = Chunks(own, density, like.device)
        length = 4 * len(chunks.starts) + chunks.total + 3 * -(-chunks.total // 4)
        length += length % 2  # so that all magnitudes are aligned
        elements = slice(element, element + sum(own))
        yield Message(chunks, elements, slice(byte, byte + length))
        element, byte = elements.stop, byte + length


def num_messages(received: float, most: int) -> int:
    """How many messages a replica sends, so that what is received at once of so many bytes in all
    takes at most so much memory. What is small is one message."""
    return max(1, math.ceil(received / max(most, _SMALL)))


def add_in_order(out: Tensor, places: Tensor, values: Tensor) -> None:
    """Add values (n,) to `out` (numel,) at their places, those of one place in their order."""
    if out.is_cuda:  # where index_add_ adds in any order, and this sorts by place first
        out.index_put_((places,), values, accumulate=True)
    else:  # where that does so on several threads
        out.index_add_(0, places, values)


class Chunks:
    """The chunks of tensors of these sizes: integers (chunks,), on a device.

    Args:
        sizes, density: see `SparseMean`.
    """

    def __init__(self, sizes: Sequence[int], density: float, device: torch.device) -> None:
        widths = [min(CHUNK, size - at) for size in sizes for at in range(0, size, CHUNK)]
        kept = [max(1, round(density * width)) for width in widths]
        starts, firsts = ([*accumulate(numbers, initial=0)] for numbers in (widths, kept))
        self.starts = torch.tensor(starts[:-1], device=device)
        """The first element of each, as an index of the vector."""
        self.widths = torch.tensor(widths, device=device)
        self.kept = torch.tensor(kept, device=device)
        """K: how many elements of each travel."""
        self.firsts = torch.tensor(firsts[:-1], device=device)
        """Where the first one of each is among all that are kept, which are `total`."""
        self.total = firsts[-1]
        self.widest, self.most_kept = max(widths), max(kept)
        self.pieces = [
            Piece(
                some,
                slice(starts[some.start], starts[some.stop]),
                slice(firsts[some.start], firsts[some.stop]),
                min(widths[some]) == self.widest,
            )
            for some in pack([self.widest] * len(widths), _PIECE)
        ]


class Piece(NamedTuple):
    """Chunks that PyTorch works on at a time: slices of all chunks, of the vector and of the values
    that are kept, and whether all of them are as wide as the widest."""

    chunks: slice
    elements: slice
    kept: slice
    even: bool


def _choose(error: Tensor, chunks: Chunks, numbers: Tensor, magnitudes: Tensor) -> None:
    """Write the numbers (kept,) of the largest errors, and the magnitudes (chunks, 2)."""
    column = torch.arange(chunks.widest, device=error.device)
    slot = column[: chunks.most_kept]
    for piece in chunks.pieces:
        start, width, kept = (
            of_chunks[piece.chunks].unsqueeze(1)
            for of_chunks in (chunks.starts, chunks.widths, chunks.kept)
        )
        if piece.even:
            sizes = error[piece.elements].view(-1, chunks.widest).abs()
        else:
            places = (start + column).clamp_(max=len(error) - 1)
            sizes = error[places].abs_().where(column < width, -1)
        taken, most = largest(sizes, kept, chunks.most_kept)
        travels = slot < kept
        mean = _mean_where(travels, most).to(sizes.dtype)
        high = travels & (most >= mean)
        magnitudes[piece.chunks, :1] = _mean_where(travels ^ high, most)
        magnitudes[piece.chunks, 1:] = _mean_where(high, most)
        num_kept = piece.kept.stop - piece.kept.start
        row, index = taken.nonzero_static(size=num_kept).unbind(1)
        above = sizes[row, index] >= mean[row, 0]
        negative = error[start[row, 0] + index] < 0
        numbers[piece.kept] = (2 * above + negative << 12) + index


def largest(sizes: Tensor, kept: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return which of the sizes (rows, width) are the `kept` (rows, 1) largest of their row, and
    the `most` largest sizes (rows, most) in descending order.

    Of equal sizes those with the smaller indices are taken. NaN counts as infinite, so that it
    travels and shows.

    Args:
        sizes: changed in place. They are 0 or more; less where an element is not in the row.
        most: the largest of `kept`.
    """
    sizes.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    # Which of equal ones topk takes is not defined.
    found = sizes.topk(most, dim=1).values
    least = found.gather(1, kept - 1)
    taken, equal = sizes > least, sizes == least
    room = kept - taken.sum(dim=1, keepdim=True)
    return taken | (equal & (equal.cumsum(dim=1) <= room)), found


def _mean_where(some: Tensor, sizes: Tensor) -> Tensor:
    """Return the mean (rows, 1) of the sizes (rows, width) for which `some` is true; 0 without any.

    It is added up in fp64, so that the order hardly ever shows when it is rounded."""
    total = sizes.where(some, 0).sum(dim=1, keepdim=True, dtype=torch.float64)
    return total / some.sum(dim=1, keepdim=True).clamp(min=1)


def _shifts(numbers: Tensor) -> Tensor:
    return torch.arange(0, 24, 6, dtype=numbers.dtype, device=numbers.device)
