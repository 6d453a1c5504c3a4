"""The mean over the replicas of the largest waves of a momentum that each of them keeps.

    replica i:  δ^i ← β δ^i + γ g^i;  c = DCT of each block of δ^i
                s^i = the k largest |c| of each block;  δ^i ← δ^i − IDCT(s^i)
    all:        IDCT of each coefficient's mean over those that have sent it, 0 if none has

A block of a matrix has the largest divisor of its rows, up to a limit, times that of its columns;
one of a vector has a divisor of its length. A tensor of more dimensions is a matrix, flattened
behind the first, and a scalar is a block of its own. (DeMo, arXiv 2411.19870.)

δ is held as its coefficients c, because the DCT is linear and orthonormal:  c ← β c + γ DCT(g);
what is sent becomes 0. That saves a transform, and nothing is left of what was sent. The DCT is a
product with a matrix; blocks of one shape, of whatever tensors, are transformed together.

A message holds the values of its pieces, then the index of each in its block, in 16 bits. All
messages have the same length, so an all-gather brings each to every replica, which adds them in the
order of the ranks: what comes out is equal on all, bit for bit. Where all that is received would
take more memory than the parameters, there are several messages, one after the other.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import Tensor

from co2.comm.background_mean import BackgroundMean
from co2.comm.cuts import pack
from co2.comm.flat import FlatParams, chunk_numel
from co2.comm.mesh import Mesh
from co2.comm.sparse_mean import add_in_order, largest, num_messages
from co2.config import CommConfig

_LEAST = 1 << 20
"""Elements of a piece that is not made smaller."""
WIDEST = 128
"""The largest side of a block: indices of a much larger one would not fit into 16 bits."""


class DCTMean:
    """Replaces gradients by the mean of the largest waves of the replicas' momenta.

    Args:
        flat: the parameters.
        mesh: the replicas. A single replica drops what is small too, but sends nothing.
        comm: how messages travel.
        decay: β.
        top_k: k.
        block: rows and columns that a block has at most, up to `WIDEST`.
    """

    def __init__(
        self, flat: FlatParams, mesh: Mesh, comm: CommConfig, decay: float, top_k: int, block: int
    ) -> None:
        self._flat, self._decay, self.num_replicas = flat, decay, mesh.num_replicas
        shapes = [param.shape for param in flat.params]
        width, numel = flat.dtype.itemsize, sum(map(math.prod, shapes))
        *_, last = cut(shapes, block, top_k, numel)
        received = mesh.num_replicas * last.kept.stop * (width + 2)
        several = num_messages(received, numel * width)
        most = min(chunk_numel(flat.device), max(_LEAST, numel // several))
        self._pieces = list(cut(shapes, block, top_k, most))
        sides = {side for piece in self._pieces for side in (piece.height, piece.width)}
        self._matrices = {side: dct_matrix(side).to(flat.device, flat.dtype) for side in sides}
        self.coefficients = flat.zeros()
        """c, piece after piece."""
        self._messages = list(_messages(self._pieces, width, several))
        self.sent = torch.zeros(self._messages[-1].span.stop, dtype=torch.uint8, device=flat.device)
        """All messages of this replica."""
        longest = max(message.num_bytes for message in self._messages)
        self.mean = BackgroundMean(
            mesh.num_replicas * longest, mesh, comm, dtype=torch.uint8, device=flat.device
        )
        """Carries the messages. Its buffer holds what was received."""

    def replace_gradients(self, rates: Sequence[float]) -> None:
        """Set every gradient to the mean. Blocking.

        Args:
            rates: γ of each parameter.
        """
        for message in self._messages:
            for piece in message.pieces:
                self._choose(message, piece, rates)
        for message in self._messages:
            received = self._exchanged(self.sent[message.span])
            for piece in message.pieces:
                self._set_gradients(message, piece, received)

    def _exchanged(self, sent: Tensor) -> Tensor:
        """Return the messages (replicas, bytes) of all replicas."""
        mean, gather = self.mean, dist.all_gather_into_tensor
        into = mean.buffer[: self.num_replicas * len(sent)]
        num_bytes = (self.num_replicas - 1) * len(sent)
        mean.run(lambda: mean.exchange(gather, into, sent), num_bytes)
        mean.wait()
        return into.view(self.num_replicas, -1)

    def bytes_per_mean(self) -> int:
        """Bytes that one worker sends for one mean: around a ring, a message to each other one."""
        return (self.num_replicas - 1) * self.sent.numel()

    def _choose(self, message: "Message", piece: "Piece", rates: Sequence[float]) -> None:
        """Add the gradients to the momentum, and move its largest coefficients to the message."""
        blocks = self.coefficients.new_zeros(piece.shape)
        for strip in piece.strips:
            gradient = self._flat.owners[strip.tensor].grad
            if gradient is not None:
                part = blocks[strip.blocks]
                part.copy_(strip.blocks_of(gradient, piece)).mul_(rates[strip.tensor])
        rows, columns = self._matrices[piece.height], self._matrices[piece.width]
        own = self.coefficients[piece.elements].view(len(blocks), -1)
        own.mul_(self._decay).add_((rows @ blocks @ columns.T).view_as(own))
        kept = torch.full((len(own), 1), piece.top_k, device=own.device)
        taken, _ = largest(own.abs(), kept, piece.top_k)
        index = taken.nonzero_static(size=piece.num_kept)[:, 1].view(len(own), -1)
        values, indices = message.parts(self.sent[message.span], piece, own.dtype)
        values.copy_(own.gather(1, index).view(-1))
        indices.copy_(index.view(-1))
        own.scatter_(1, index, 0)

    def _set_gradients(self, message: "Message", piece: "Piece", received: Tensor) -> None:
        """Set the gradients to the mean of messages (replicas, bytes)."""
        total = self.coefficients.new_zeros(piece.shape)
        count = torch.zeros_like(total)
        starts = torch.arange(0, total.numel(), piece.height * piece.width, device=total.device)
        # Bounded, as the temporaries are.
        at_once = max(1, max(_LEAST, total.numel()) // piece.num_kept)
        for some in received.split(at_once):
            values, index = message.parts(some, piece, total.dtype)
            blocks = index.unflatten(1, (len(total), -1))
            places = (starts.unsqueeze(1) + blocks).reshape(-1)
            add_in_order(total.view(-1), places, values.reshape(-1))
            add_in_order(count.view(-1), places, torch.ones_like(places, dtype=total.dtype))
        rows, columns = self._matrices[piece.height], self._matrices[piece.width]
        means = rows.T @ total.div_(count.clamp_(min=1)) @ columns
        for strip in piece.strips:
            owner = self._flat.owners[strip.tensor]
            if owner.grad is None:
                owner.grad = torch.zeros_like(owner)
            strip.write(owner.grad, means[strip.blocks], piece)


@dataclass(frozen=True)
class Message:
    """What a replica sends at once: that of some pieces."""

    pieces: tuple["Piece", ...]
    span: slice
    """Its bytes, as a slice of all that the replica sends."""
    values: slice
    """The values, as a slice of its bytes."""
    indices: slice

    @property
    def num_bytes(self) -> int:
        return self.span.stop - self.span.start

    def parts(self, messages: Tensor, piece: "Piece", dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the values, of this type, and the indices of a piece in messages (…, bytes), as
        views (…, kept)."""
        first = self.pieces[0].kept.start
        kept = slice(piece.kept.start - first, piece.kept.stop - first)
        values = messages[..., self.values].view(dtype)[..., kept]
        return values, messages[..., self.indices].view(torch.int16)[..., kept]


def _messages(pieces: Sequence["Piece"], width: int, several: int) -> Iterator[Message]:
    """Yield about so many messages of neighbours, of values of `width` bytes."""
    kept = [piece.num_kept for piece in pieces]
    begin = 0
    for some in pack(kept, -(-sum(kept) // several)):
        own = sum(kept[some])
        length = -(-own * (width + 2) // width) * width  # whole values, so that all are aligned
        values, indices = slice(0, own * width), slice(own * width, own * (width + 2))
        yield Message(tuple(pieces[some]), slice(begin, begin + length), values, indices)
        begin += length


@dataclass(frozen=True)
class Strip:
    """Rows of blocks of one tensor, in a piece."""

    tensor: int
    """Its place among the trained parameters."""
    span: slice
    """They, as a slice of the tensor's first dimension."""
    columns: int
    """Elements of a row."""
    blocks: slice
    """They, as a slice of the piece's blocks."""

    def blocks_of(self, tensor: Tensor, piece: "Piece") -> Tensor:
        """Return the blocks (blocks, height, width) of a tensor of the parameter's shape."""
        rows = (tensor if tensor.dim() else tensor.view(1))[self.span]
        cut = rows.reshape(-1, piece.height, self.columns // piece.width, piece.width)
        return cut.transpose(1, 2).reshape(-1, piece.height, piece.width)

    def write(self, tensor: Tensor, blocks: Tensor, piece: "Piece") -> None:
        """Set that part of a tensor to its blocks."""
        rows = (tensor if tensor.dim() else tensor.view(1))[self.span]
        cut = blocks.view(-1, self.columns // piece.width, piece.height, piece.width)
        rows.copy_(cut.transpose(1, 2).reshape(rows.shape))


@dataclass(frozen=True)
class Piece:
    """Blocks of one shape that are worked on together, which bounds the temporaries."""

    height: int
    width: int
    top_k: int
    """Coefficients that are sent of each block."""
    strips: tuple[Strip, ...]
    elements: slice
    """Their coefficients, as a slice of all."""
    kept: slice
    """What is sent of them, as a slice of all that is."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(blocks, height, width)."""
        return self.strips[-1].blocks.stop, self.height, self.width

    @property
    def num_kept(self) -> int:
        return self.kept.stop - self.kept.start


def cut(shapes: Sequence[Sequence[int]], block: int, top_k: int, most: int) -> Iterator[Piece]:
    """Cut tensors of these shapes into pieces of at most so many elements, or of a row of blocks.

    A vector has rows as long as a block.
    """
    kinds: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for tensor, shape in enumerate(shapes):
        numel = math.prod(shape)
        if numel:
            rows = shape[0] if len(shape) > 1 else numel // _divisor(numel, block)
            height = _divisor(rows, block) if len(shape) > 1 else 1
            width = _divisor(numel // rows, block)
            columns = numel // rows
            unit = 1 if len(shape) > 1 else columns  # what a row is in the first dimension
            kinds.setdefault((height, width), []).append((tensor, rows, columns, unit))
    element = kept = 0
    for (height, width), tensors in kinds.items():
        taken = min(top_k, height * width)
        for strips in _strips(tensors, height, width, most):
            blocks = strips[-1].blocks.stop
            until, last = element + blocks * height * width, kept + blocks * taken
            spans = slice(element, until), slice(kept, last)
            yield Piece(height, width, taken, tuple(strips), *spans)
            element, kept = until, last


def _strips(
    tensors: Sequence[tuple[int, int, int, int]], height: int, width: int, most: int
) -> Iterator[list[Strip]]:
    """Yield the strips of each piece, of tensors (number, rows, columns, elements of the first
    dimension in a row) with blocks of one shape."""
    rows = [(one, row) for one in tensors for row in range(0, one[1], height)]
    for some in pack([height * one[2] for one, _ in rows], most):
        strips: list[Strip] = []
        blocks = 0
        for (tensor, _, columns, unit), own in groupby(rows[some], itemgetter(0)):
            begins = [row for _, row in own]
            span = slice(begins[0] * unit, (begins[-1] + height) * unit)
            until = blocks + len(begins) * (columns // width)
            strips.append(Strip(tensor, span, columns, slice(blocks, until)))
            blocks = until
        yield strips


def _divisor(size: int, most: int) -> int:
    """Return the largest divisor that is at most `most`."""
    return next(d for d in range(min(size, most), 0, -1) if size % d == 0)


def dct_matrix(size: int) -> Tensor:
    """Return the matrix (size, size) of the orthonormal DCT-II, in fp64, whose product with a
    vector is the vector's transform, and whose transpose is its inverse. Zeros of the cosine are
    exactly 0: were they rounding errors, their sign would be a step."""
    frequency = torch.arange(size).unsqueeze(1)
    angle = frequency * (2 * torch.arange(size) + 1)  # in units of π/(2 size)
    found = (angle.double() * (math.pi / (2 * size))).cos() * math.sqrt(2 / size)
    found[angle % (2 * size) == size] = 0
    found[0] = math.sqrt(1 / size)
    return found
