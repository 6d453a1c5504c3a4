"""The mean over the replicas, compressed to a few bits for each element, with error feedback.

    worker:  x ← x + e;  send C(x);  e ← x − C(x)          C: a compressor (co2/comm/compress.py)
    server:  the same with the mean of what arrived, for the chunk that it owns

Every replica is both a worker and the server of one chunk of ⌈numel/G⌉ elements: an all-to-all
brings each chunk to its server, and an all-gather brings the compressed means back. (1-bit Adam,
arXiv 2102.02888, section 4; error feedback: arXiv 1901.09847.)

Every parameter tensor has a scale of its own; on a server, so has the part of it in the chunk. The
paper has one scale for the whole vector, in which tensors with small values would get lost.
A message is one row of bytes: the scales of the chunk's tensors, then the packed codes. These are
made of many tensors at once, because a model has dozens of small ones.
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
"""Elements packed at a time, at most, which bounds the temporaries. It must be equal on all
workers."""


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
        self._counts = torch.tensor(self._sizes, device=like.device)
        self._parts = _parts(self._sizes, mesh.num_replicas, compressor, like)
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
        scales = self._scales(vector, self._sizes, self._counts, mask)
        for part, row in zip(self._parts, self._sent, strict=True):
            alive, error = part.of(mask), self.worker_error[part.span]
            self._compress(part, vector[part.span], scales[part.tensors], alive, row, error)
        self._to_servers()
        own, alive = vector[self._own.span], self._own.of(mask)
        self._mean_of_received(own)  # overwrites what has been sent
        _correct(own, self.server_error, alive)
        scales = self._scales(own, self._own.sizes, self._own.counts, alive)
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

    def _scales(
        self, x: Tensor, sizes: Sequence[int], counts: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Return one scale for each of the tensors that make up x, of these sizes."""
        if not sizes:
            return x.new_zeros(0)
        if mask is not None:
            alive = [part.count_nonzero() for part in mask.split(sizes)]
            counts = torch.stack(alive).clamp_(min=1)
        return self._compressor.scales(x.split(sizes), counts)

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
            s = segment.of_elements(scales)
            codes = self._compressor.codes(x[segment.span], s)
            pack(codes, self._compressor.bits, row[segment.packed])
            values = error[segment.span]
            values.copy_(codes)
            self._compressor.values_(values, s)
        _clear(error, mask)
        torch.sub(x, error, out=error)

    def _read(self, part: "Part", row: Tensor, mask: Tensor | None, out: Tensor) -> None:
        """Write the values that a message stands for to `out`."""
        scales = part.scales(row, out.dtype)
        for segment in part.segments:
            values = out[segment.span]
            unpack(row[segment.packed], self._compressor.bits, values)
            self._compressor.values_(values, segment.of_elements(scales))
        _clear(out, mask)

    def _mean_of_received(self, out: Tensor) -> None:
        out.zero_()
        for row in self._received:
            scales = self._own.scales(row, out.dtype)
            for segment in self._own.segments:
                values = out[segment.span]
                piece = self._piece[: values.numel()]
                unpack(row[segment.packed], self._compressor.bits, piece)
                self._compressor.values_(piece, segment.of_elements(scales))
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
    """Consecutive elements of one chunk, which are packed together."""

    span: slice
    """Its elements, as a slice of the chunk."""
    tensors: slice
    """The tensors that they are of, as a slice of the chunk's."""
    counts: Tensor
    """How many of them are of each of these tensors."""
    packed: slice
    """Its bytes, as a slice of the message."""

    def of_elements(self, scales: Tensor) -> Tensor:
        """From scales (tensors of the chunk,) return those of the elements, or (1,) if all of them
        have the same one."""
        own = scales[self.tensors]
        numel = self.span.stop - self.span.start
        return own if len(own) == 1 else own.repeat_interleave(self.counts, output_size=numel)


@dataclass(frozen=True)
class Part:
    """One server's chunk, and the layout of a message about it."""

    span: slice
    """The chunk's elements, as a slice of the vector."""
    tensors: slice
    """The tensors that reach into the chunk, as a slice of all tensors."""
    sizes: list[int]
    """How many elements each of them has in the chunk."""
    counts: Tensor
    """The same, where the vector is."""
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


def _parts(sizes: Sequence[int], replicas: int, compressor: Compressor, like: Tensor) -> list[Part]:
    """Return the servers' chunks. The last ones may be shorter, or empty."""
    bounds = list(pairwise(accumulate(sizes, initial=0)))
    numel = sum(sizes)
    chunk = -(-numel // replicas)
    parts = []
    for begin in range(0, replicas * chunk, chunk):
        begin, end = min(begin, numel), min(begin + chunk, numel)
        inside = [i for i, (first, last) in enumerate(bounds) if first < end and last > begin]
        spans = [(max(bounds[i][0], begin), min(bounds[i][1], end)) for i in inside]
        widths = [last - first for first, last in spans]
        segments = _segments(widths, like.element_size() * len(inside), compressor.bits, like)
        at = segments[-1].packed.stop if segments else 0
        tensors = slice(inside[0], inside[-1] + 1) if inside else slice(0, 0)
        counts = torch.tensor(widths, device=like.device)
        parts.append(Part(slice(begin, end), tensors, widths, counts, segments, at))
    return parts


def _segments(widths: Sequence[int], at: int, bits: int, like: Tensor) -> list[Segment]:
    """Return the segments of tensors of these widths, whose codes begin at this byte."""
    start, segments = 0, []
    for pieces in _together(widths, bits):
        counts = torch.tensor([count for _, count in pieces], device=like.device)
        numel = sum(count for _, count in pieces)
        taken = num_bytes(numel, bits)
        tensors = slice(pieces[0][0], pieces[-1][0] + 1)
        span, packed = slice(start, start + numel), slice(at, at + taken)
        segments.append(Segment(span, tensors, counts, packed))
        start, at = start + numel, at + taken
    return segments


def _together(widths: Sequence[int], bits: int) -> list[list[tuple[int, int]]]:
    """Group tensors of these widths, as (tensor, elements), so that few calls pack all of them.

    A group has at most `_PIECE` elements. No byte has codes of two tensors, so that a group goes on
    where the last tensor has filled its bytes.
    """
    groups: list[list[tuple[int, int]]] = []
    held = 0
    for tensor, width in enumerate(widths):
        for start in range(0, width, _PIECE):
            count = min(_PIECE, width - start)
            if not groups or held * bits % 8 or held + count > _PIECE:
                groups.append([])
                held = 0
            groups[-1].append((tensor, count))
            held += count
    return groups


def _correct(x: Tensor, error: Tensor, mask: Tensor | None) -> None:
    """Add `error` to x, and set x to 0 where `mask` is 0."""
    x.add_(error)
    _clear(x, mask)


def _clear(x: Tensor, mask: Tensor | None) -> None:
    """Set x to 0 where `mask` is 0."""
    if mask is not None:
        x.mul_(mask)
