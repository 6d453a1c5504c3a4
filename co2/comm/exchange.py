"""The mean over the replicas, compressed to a few bits for each element, with error feedback.

    worker:  x ← x + e;  send C(x);  e ← x − C(x)          C: a compressor (co2/comm/compress.py)
    server:  the same with the mean of what arrived, for the chunk that it owns

Every replica is both a worker and the server of one chunk of ⌈numel/G⌉ elements: an all-to-all
brings each chunk to its server, and an all-gather brings the compressed means back. (1-bit Adam,
arXiv 2102.02888, section 4; error feedback: arXiv 1901.09847.)

Every parameter tensor has a scale of its own; on a server, so has the part of it in the chunk. The
paper has one scale for the whole vector, in which tensors with small values would get lost.
A message is one row of bytes: the scales of the chunk's tensors, then the packed codes of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from co2.comm.background import BackgroundMean
from co2.comm.compress import Compressor, num_bytes, pack, unpack
from co2.comm.mesh import Mesh

_PIECE = 1 << 20
"""Elements packed at a time, which bounds the temporaries. It must be equal on all workers."""


class CompressedMean:
    """Takes compressed means of one vector after another. A `BackgroundMean` carries them.

    Args:
        sizes: the numbers of elements of the tensors that make up the vector, in its order.
        mesh: the replicas. A single replica compresses too, but sends nothing.
        mean: carries the messages over its process group. The vector has the type and the device of
            its buffer, and scales travel in that type.
        compressor: C.
    """

    def __init__(
        self, sizes: Sequence[int], mesh: Mesh, mean: BackgroundMean, compressor: Compressor
    ) -> None:
        like, self.num_replicas = mean.buffer, mesh.num_replicas
        self._mean, self._compressor = mean, compressor
        self._sizes = [size for size in sizes if size]
        self._parts = _parts(self._sizes, mesh.num_replicas, compressor, like.element_size())
        self._own = self._parts[mesh.replica]
        self.worker_error = torch.zeros_like(like)
        self.server_error = torch.zeros_like(like[self._own.span])
        row = max(part.num_bytes for part in self._parts)
        self._sent = like.new_zeros(mesh.num_replicas, row, dtype=torch.uint8)
        self._received = torch.zeros_like(self._sent)
        self._mine = self._sent[mesh.replica]
        self._piece = torch.empty_like(like[: min(len(self._parts[0]), _PIECE)])

    def start(self, vector: Tensor, mask: Tensor | None = None) -> None:
        """Launch `mean_` in the background. The vector belongs to it until somebody has waited for
        the `BackgroundMean`."""
        self._mean.run(lambda: self.mean_(vector, mask), self.bytes_per_mean())

    def mean_(self, vector: Tensor, mask: Tensor | None = None) -> None:
        """Overwrite vector (numel,) with its compressed mean, which all replicas share. Blocking.

        Args:
            vector: changed in place.
            mask: (numel,), equal on all replicas. Elements where it is 0 take no part: they do not
                count for the scales, and their mean and errors are 0. Without a mask a sign could
                not stand for 0. None: all elements take part.
        """
        _correct(vector, self.worker_error, mask)
        scales = self._scales(vector, self._sizes, mask)
        for part, row in zip(self._parts, self._sent, strict=True):
            alive, error = part.of(mask), self.worker_error[part.span]
            self._compress(part, vector[part.span], scales[part.tensors], alive, row, error)
        self._to_servers()
        own, alive = vector[self._own.span], self._own.of(mask)
        self._mean_of_received(own)  # overwrites what has been sent
        _correct(own, self.server_error, alive)
        scales = self._scales(own, self._own.sizes, alive)
        self._compress(self._own, own, scales, alive, self._mine, self.server_error)
        self._from_servers()
        for part, row in zip(self._parts, self._received, strict=True):
            self._read(part, row, part.of(mask), vector[part.span])

    def bytes_per_mean(self) -> int:
        """Bytes that one worker sends for one mean: to G−1 servers, and around a ring."""
        return 2 * (self.num_replicas - 1) * self._mine.numel()

    def state_tensors(self) -> dict[str, Tensor]:
        """Errors and messages, by name."""
        return {**self.errors(), **self.messages()}

    def errors(self) -> dict[str, Tensor]:
        """What rounding has left, to be added the next time: all that a checkpoint needs."""
        return {"worker_error": self.worker_error, "server_error": self.server_error}

    def messages(self) -> dict[str, Tensor]:
        """What travels; between two means it is not needed."""
        return {"sent": self._sent, "received": self._received}

    def scratch_tensors(self) -> list[Tensor]:
        return [self._piece]

    def _scales(self, x: Tensor, sizes: Sequence[int], mask: Tensor | None) -> Tensor:
        """Return one scale for each of the tensors that make up x."""
        scales = x.new_zeros(len(sizes))
        alive = [None] * len(sizes) if mask is None else mask.split(sizes)
        for out, values, some in zip(scales, x.split(sizes), alive, strict=True):
            count = values.numel() if some is None else some.count_nonzero().clamp(min=1)
            out.copy_(self._compressor.scale(values.split(_PIECE), count))
        return scales

    def _compress(
        self,
        part: "Part",
        x: Tensor,
        scales: Tensor,
        mask: Tensor | None,
        row: Tensor,
        error: Tensor,
    ) -> None:
        """Write the message of C(x) to `row`, and x − C(x) to `error`."""
        head = scales.view(torch.uint8)
        row[: head.numel()].copy_(head)
        for segment in part.segments:
            codes = self._compressor.codes(x[segment.span], scales[segment.tensor])
            pack(codes, self._compressor.bits, row[segment.packed])
        self._read(part, row, mask, error)
        torch.sub(x, error, out=error)

    def _read(self, part: "Part", row: Tensor, mask: Tensor | None, out: Tensor) -> None:
        """Write the values that a message stands for to `out`."""
        scales = part.scales(row, out.dtype)
        for segment in part.segments:
            values = out[segment.span]
            unpack(row[segment.packed], self._compressor.bits, values)
            self._compressor.values_(values, scales[segment.tensor])
            if mask is not None:
                values.masked_fill_(mask[segment.span] == 0, 0)

    def _mean_of_received(self, out: Tensor) -> None:
        out.zero_()
        for row in self._received:
            scales = self._own.scales(row, out.dtype)
            for segment in self._own.segments:
                values = out[segment.span]
                piece = self._piece[: values.numel()]
                unpack(row[segment.packed], self._compressor.bits, piece)
                self._compressor.values_(piece, scales[segment.tensor])
                values.add_(piece)
        out.div_(self.num_replicas)

    def _to_servers(self) -> None:
        if self.num_replicas == 1:
            self._received.copy_(self._sent)
        else:
            dist.all_to_all_single(self._received, self._sent, group=self._mean.group)

    def _from_servers(self) -> None:
        if self.num_replicas == 1:
            self._received.copy_(self._sent)
        else:
            flat = self._received.view(-1)
            dist.all_gather_into_tensor(flat, self._mine, group=self._mean.group)


@dataclass(frozen=True)
class Segment:
    """Consecutive elements of one tensor in one chunk, which are packed together."""

    tensor: int
    """Index of the tensor among those of the chunk."""
    span: slice
    """Its elements, as a slice of the chunk."""
    packed: slice
    """Its bytes, as a slice of the message."""


@dataclass(frozen=True)
class Part:
    """One server's chunk, and the layout of a message about it."""

    span: slice
    """The chunk's elements, as a slice of the vector."""
    tensors: slice
    """The tensors that reach into the chunk, as a slice of all tensors."""
    sizes: list[int]
    """How many elements each of them has in the chunk."""
    segments: list[Segment]
    num_bytes: int
    """Bytes of a message."""

    def __len__(self) -> int:
        return self.span.stop - self.span.start

    def of(self, vector: Tensor | None) -> Tensor | None:
        """Return this chunk of a vector, as a view."""
        return None if vector is None else vector[self.span]

    def scales(self, row: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the scales of a message. They are copied because a row need not be aligned."""
        return row[: len(self.sizes) * dtype.itemsize].clone().view(dtype)


def _parts(
    sizes: Sequence[int], replicas: int, compressor: Compressor, scale_bytes: int
) -> list[Part]:
    """Return the servers' chunks. The last ones may be shorter, or empty."""
    bounds = list(pairwise(accumulate(sizes, initial=0)))
    numel = sum(sizes)
    chunk = -(-numel // replicas)
    parts = []
    for begin in range(0, replicas * chunk, chunk):
        begin, end = min(begin, numel), min(begin + chunk, numel)
        inside = [i for i, (first, last) in enumerate(bounds) if first < end and last > begin]
        spans = [(max(bounds[i][0], begin), min(bounds[i][1], end)) for i in inside]
        at, segments = scale_bytes * len(inside), []
        for tensor, (first, last) in enumerate(spans):
            for start in range(first, last, _PIECE):
                stop = min(start + _PIECE, last)
                taken = num_bytes(stop - start, compressor.bits)
                span = slice(start - begin, stop - begin)
                segments.append(Segment(tensor, span, slice(at, at + taken)))
                at += taken
        tensors = slice(inside[0], inside[-1] + 1) if inside else slice(0, 0)
        widths = [last - first for first, last in spans]
        parts.append(Part(slice(begin, end), tensors, widths, segments, at))
    return parts


def _correct(x: Tensor, error: Tensor, mask: Tensor | None) -> None:
    """Add `error` to x, and set x to 0 where `mask` is 0."""
    x.add_(error)
    if mask is not None:
        for values, some in zip(x.split(_PIECE), mask.split(_PIECE), strict=True):
            values.masked_fill_(some == 0, 0)
