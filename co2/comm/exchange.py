"""The mean over the replicas with few bits an element on the wire, and error feedback.

    worker:  x ← x + e;  send C(x);  e ← x − C(x)          C: a compressor (co2/comm/compress.py)
    server:  the same with the mean of what arrived, for the chunk that it owns

Every replica is a worker, and the server of one chunk of ⌈numel/G⌉ elements: an all-to-all brings
each chunk to its server, an all-gather brings its compressed mean back. (1-bit Adam, arXiv
2102.02888, section 4; error feedback: arXiv 1901.09847.)

Every parameter tensor has a scale of its own, on a server the part of it in the chunk: one for the
whole vector, as the paper writes it, drowns the tensors with small values.
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
"""Elements packed at a time, which bounds the temporaries. Both ends of the wire must agree."""


class CompressedMean:
    """The compressed mean of one vector, again and again, carried by an `BackgroundMean`.

    Args:
        sizes: elements of the tensors that the vector is made of, in its order.
        mesh: the replicas. A single one compresses too, and sends nothing.
        mean: carries it, with its process group; the vector is of its buffer's type and device,
            and scales travel in that type.
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
        """Launch `mean_`; the vector belongs to it until the `BackgroundMean` is waited for."""
        self._mean.run(lambda: self.mean_(vector, mask), self.bytes_per_mean())

    def mean_(self, vector: Tensor, mask: Tensor | None = None) -> None:
        """vector (numel,) ← its compressed mean over the replicas, the same on all. Blocking.

        Elements whose `mask`, equal on all replicas, is 0 take no part: nothing of them is sent
        or counted, and mean and errors are 0. A sign could not say "nothing".
        """
        _correct(vector, self.worker_error, mask)
        scales = self._scales(vector, self._sizes, mask)
        for part, row in zip(self._parts, self._sent, strict=True):
            alive, error = part.of(mask), self.worker_error[part.span]
            self._compress(part, vector[part.span], scales[part.tensors], alive, row, error)
        self._to_servers()
        own, alive = vector[self._own.span], self._own.of(mask)
        self._mean_of_received(own)  # what it held is on its way
        _correct(own, self.server_error, alive)
        scales = self._scales(own, self._own.sizes, alive)
        self._compress(self._own, own, scales, alive, self._mine, self.server_error)
        self._from_servers()
        for part, row in zip(self._parts, self._received, strict=True):
            self._read(part, row, part.of(mask), vector[part.span])

    def bytes_per_mean(self) -> int:
        """Bytes that one worker sends for one mean: to G−1 servers, and round a ring."""
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
        """One for each of the tensors that x is made of."""
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
        """Message of C(x) → `row`; x − C(x) → `error`."""
        head = scales.view(torch.uint8)
        row[: head.numel()].copy_(head)
        for run in part.runs:
            codes = self._compressor.codes(x[run.span], scales[run.tensor])
            pack(codes, self._compressor.bits, row[run.packed])
        self._read(part, row, mask, error)
        torch.sub(x, error, out=error)

    def _read(self, part: "Part", row: Tensor, mask: Tensor | None, out: Tensor) -> None:
        """A message → the values that it stands for."""
        scales = part.scales(row, out.dtype)
        for run in part.runs:
            values = out[run.span]
            unpack(row[run.packed], self._compressor.bits, values)
            self._compressor.values_(values, scales[run.tensor])
            if mask is not None:
                values.masked_fill_(mask[run.span] == 0, 0)

    def _mean_of_received(self, out: Tensor) -> None:
        out.zero_()
        for row in self._received:
            scales = self._own.scales(row, out.dtype)
            for run in self._own.runs:
                values = out[run.span]
                piece = self._piece[: values.numel()]
                unpack(row[run.packed], self._compressor.bits, piece)
                self._compressor.values_(piece, scales[run.tensor])
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
class Run:
    """Consecutive elements of one tensor in one chunk: what is packed together."""

    tensor: int
    """Counted in the chunk."""
    span: slice
    """Of the chunk."""
    packed: slice
    """Of the message."""


@dataclass(frozen=True)
class Part:
    """One server's chunk, and what a message about it looks like."""

    span: slice
    """Of the vector."""
    tensors: slice
    """Those that reach into the chunk, among all."""
    sizes: list[int]
    """Elements of each of them in the chunk."""
    runs: list[Run]
    num_bytes: int
    """Of a message."""

    def __len__(self) -> int:
        return self.span.stop - self.span.start

    def of(self, vector: Tensor | None) -> Tensor | None:
        return None if vector is None else vector[self.span]

    def scales(self, row: Tensor, dtype: torch.dtype) -> Tensor:
        """Those of a message; the copy is aligned, as a row need not be."""
        return row[: len(self.sizes) * dtype.itemsize].clone().view(dtype)


def _parts(
    sizes: Sequence[int], replicas: int, compressor: Compressor, scale_bytes: int
) -> list[Part]:
    """The servers' chunks. The last ones may be shorter, or empty."""
    bounds = list(pairwise(accumulate(sizes, initial=0)))
    numel = sum(sizes)
    chunk = -(-numel // replicas)
    parts = []
    for begin in range(0, replicas * chunk, chunk):
        begin, end = min(begin, numel), min(begin + chunk, numel)
        inside = [i for i, (first, last) in enumerate(bounds) if first < end and last > begin]
        spans = [(max(bounds[i][0], begin), min(bounds[i][1], end)) for i in inside]
        at, runs = scale_bytes * len(inside), []
        for tensor, (first, last) in enumerate(spans):
            for start in range(first, last, _PIECE):
                stop = min(start + _PIECE, last)
                taken = num_bytes(stop - start, compressor.bits)
                span = slice(start - begin, stop - begin)
                runs.append(Run(tensor, span, slice(at, at + taken)))
                at += taken
        tensors = slice(inside[0], inside[-1] + 1) if inside else slice(0, 0)
        widths = [last - first for first, last in spans]
        parts.append(Part(slice(begin, end), tensors, widths, runs, at))
    return parts


def _correct(x: Tensor, error: Tensor, mask: Tensor | None) -> None:
    """x ← x + error, and 0 where `mask` is."""
    x.add_(error)
    if mask is not None:
        for values, some in zip(x.split(_PIECE), mask.split(_PIECE), strict=True):
            values.masked_fill_(some == 0, 0)
