"""The mean over the replicas, compressed to a few bits for each element, with error feedback.

    worker:  x ← x + e;  send C(x);  e ← x − C(x)          C: a compressor (co2/comm/compress.py)
    server:  the same with the mean of what arrived, for the chunk that it owns

Every replica is both a worker and the server of one chunk of ⌈numel/G⌉ elements: an all-to-all
brings each chunk to its server, and an all-gather brings the compressed means back. (1-bit Adam,
arXiv 2102.02888, section 4; error feedback: arXiv 1901.09847.)

Every parameter tensor has a scale of its own; on a server, so has the part of it in the chunk. The
paper has one scale for the whole vector, in which tensors with small values would get lost.
A message is one row of bytes: the scales of the chunk's segments, which are the parts of tensors in
it, then the packed codes. The number of calls depends neither on that of the tensors nor on G.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from co2.comm.background import BackgroundMean
from co2.comm.compress import Codec, Compressor, Norms
from co2.comm.mesh import Mesh


class CompressedMean:
    """Takes compressed means of one vector after another. A `BackgroundMean` carries them.

    Args:
        sizes: the numbers of elements of the tensors that make up the vector, in its order.
        mesh: the replicas. A single replica compresses too, but sends nothing.
        mean: carries the messages over its process group. The vector has the type and the device of
            its buffer, and scales travel in that type.
        compressor: C.
        masked: whether `set_mask` will be called.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        mesh: Mesh,
        mean: BackgroundMean,
        compressor: Compressor,
        masked: bool = False,
    ) -> None:
        like, self.num_replicas = mean.buffer, mesh.num_replicas
        self._mean, self._compressor, self._replica = mean, compressor, mesh.replica
        sizes = [size for size in sizes if size]
        chunk = -(-like.numel() // mesh.num_replicas)
        segments = list(_segments(sizes, chunk))
        own = [segment.numel for segment in segments if segment.server == mesh.replica]
        begin = min(mesh.replica * chunk, like.numel())
        self._own = slice(begin, begin + sum(own))
        self._worker = Codec(compressor, [one.numel for one in segments], chunk, like)
        self._server = Codec(compressor, own, max(1, sum(own)), like, mesh.num_replicas)
        self._norms, self._own_norms = Norms(sizes, like), Norms(own, like)
        self._divisors = compressor.divisors(like.new_tensor(sizes))
        self._own_divisors = compressor.divisors(like.new_tensor(own))
        self.mask: Tensor | None = None
        """(numel,): which elements take part. None: all of them."""
        if masked:
            self.mask = torch.ones_like(like, dtype=torch.bool)
        self.worker_error = torch.zeros_like(like)
        self.server_error = torch.zeros_like(like[self._own])
        width, most = like.element_size(), max(segment.place + 1 for segment in segments)
        self._head = most * width
        row = -(
            -(self._head + self._worker.row_bytes) // width
        )  # in scales, so that all are aligned
        self._sent = like.new_zeros(mesh.num_replicas, row * width, dtype=torch.uint8)
        self._received = torch.zeros_like(self._sent)
        self._mine = self._sent[mesh.replica]
        self._tensors = torch.tensor([one.tensor for one in segments], device=like.device)
        places = [one.server * row + one.place for one in segments]
        self._places = torch.tensor(places, device=like.device)

    def start(self, vector: Tensor) -> None:
        """Launch `mean_` in the background. The vector belongs to it until somebody has waited for
        the `BackgroundMean`."""
        self._mean.run(lambda: self.mean_(vector), self.bytes_per_mean())

    def mean_(self, vector: Tensor) -> None:
        """Overwrite vector (numel,) with its compressed mean, equal on all replicas. Blocking."""
        _correct(vector, self.worker_error, self.mask)
        norms = self._norms.of(vector, self._compressor.order)
        scales = norms.div_(self._divisors)[self._tensors]
        self._scales(self._sent).view(-1).index_copy_(0, self._places, scales)
        codes = self._codes(self._sent, self._worker)
        self._worker.encode(vector, scales, self.mask, codes, self.worker_error)
        self._to_servers()
        own = vector[self._own]
        self._serve(own, None if self.mask is None else self.mask[self._own])
        self._from_servers()
        scales = self._scales(self._received).view(-1)[self._places]
        self._worker.decode(self._codes(self._received, self._worker), scales, self.mask, vector)

    def set_mask(self, marks: Tensor) -> None:
        """Let elements take part in the means to come only where `marks` (numel,), of the vector's
        type, is 1, and not where it is 0. It must be equal on all replicas.

        The others do not count for the scales, and their mean and errors are 0. Without a mask a
        sign could not stand for 0.
        """
        assert self.mask is not None, "made without `masked`"
        self.mask.copy_(marks)
        counts = self._norms.of(marks, 1.0).clamp_(min=1)
        self._divisors = self._compressor.divisors(counts)
        counts = self._own_norms.of(marks[self._own], 1.0).clamp_(min=1)
        self._own_divisors = self._compressor.divisors(counts)

    def bytes_per_mean(self) -> int:
        """Bytes that one worker sends for one mean: to G−1 servers, and around a ring."""
        return 2 * (self.num_replicas - 1) * self._mine.numel()

    def state_tensors(self) -> dict[str, Tensor]:
        """Errors, messages and the mask, by name."""
        mask = {} if self.mask is None else {"mask": self.mask}
        return {**self.errors(), **self.messages(), **mask}

    def errors(self) -> dict[str, Tensor]:
        """What rounding has left, to be added the next time: all that a checkpoint needs."""
        return {"worker_error": self.worker_error, "server_error": self.server_error}

    def messages(self) -> dict[str, Tensor]:
        """What travels; between two means it is not needed."""
        return {"sent": self._sent, "received": self._received}

    def _serve(self, own: Tensor, mask: Tensor | None) -> None:
        """Put the compressed mean of what has been received into the message to all. `own` is
        scratch for this server's chunk."""
        scales = self._scales(self._received)[:, : len(self._own_divisors)]
        self._server.add(self._codes(self._received, self._server), scales, own)
        _correct(own.div_(self.num_replicas), self.server_error, mask)
        norms = self._own_norms.of(own, self._compressor.order)
        scales = norms.div_(self._own_divisors)
        self._scales(self._mine)[: len(scales)].copy_(scales)
        codes = self._codes(self._mine.unsqueeze(0), self._server)
        self._server.encode(own, scales, mask, codes, self.server_error)

    def _scales(self, messages: Tensor) -> Tensor:
        """Return messages (…, bytes) as a view in the type of scales, which are at their heads."""
        return messages.view(self.worker_error.dtype)

    def _codes(self, messages: Tensor, codec: Codec) -> Tensor:
        """Return the codes of messages (rows, bytes), as a view (rows, row bytes of the codec)."""
        return messages[:, self._head : self._head + codec.row_bytes]

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
    """The part of a tensor that is in one server's chunk."""

    tensor: int
    server: int
    place: int
    """Its place among the chunk's segments."""
    numel: int


def _segments(sizes: Sequence[int], chunk: int) -> Iterator[Segment]:
    """Yield the segments of tensors of these sizes, for chunks of so many elements."""
    place, server = 0, 0
    for tensor, (begin, end) in enumerate(pairwise(accumulate(sizes, initial=0))):
        while begin < end:
            if begin // chunk != server:
                place, server = 0, begin // chunk
            until = min(end, (server + 1) * chunk)
            yield Segment(tensor, server, place, until - begin)
            place, begin = place + 1, until


def _correct(x: Tensor, error: Tensor, mask: Tensor | None) -> None:
    """Add `error` to x, and set x to 0 where the mask is false."""
    x.add_(error)
    if mask is not None:
        x.mul_(mask)
