"""The mean over the replicas, compressed to a few bits for each element, with error feedback.

    worker:  x ← x + e;  send C(x);  e ← x − C(x)          C: a compressor (co2/comm/codec.py)
    server:  the same with the mean of what arrived, for the chunk that it owns

Every replica is both a worker and the server of one chunk of ⌈numel/G⌉ elements: an all-to-all
brings each chunk to its server, and an all-gather brings the compressed means back. (1-bit Adam,
arXiv 2102.02888, section 4; error feedback: arXiv 1901.09847.)

Every parameter tensor has a scale of its own; on a server, so has the part of it in the chunk. The
paper has one scale for the whole vector, in which tensors with small values would get lost.
A message is one row of bytes: the scales of the chunk's segments, which are the parts of tensors in
it, then the packed codes. The number of calls depends neither on that of the tensors nor on G.
"""

from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from co2.comm.background_mean import BackgroundMean
from co2.comm.codec import Codec, Scales
from co2.comm.cuts import segmented
from co2.comm.mesh import Mesh


class CompressedMean:
    """Takes compressed means of one vector after another. A `BackgroundMean` carries them.

    Args:
        sizes: the numbers of elements of the tensors that make up the vector, in its order.
        mesh: the replicas. A single replica compresses too, but sends nothing.
        mean: carries the messages over its process group. The vector has the type and the device of
            its buffer, and scales travel in that type.
        bits: of a code of C.
        masked: whether `set_mask` will be called.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        mesh: Mesh,
        mean: BackgroundMean,
        bits: int,
        masked: bool = False,
    ) -> None:
        like, self.num_replicas = mean.buffer, mesh.num_replicas
        self._mean = mean
        sizes = [size for size in sizes if size]
        chunk = -(-like.numel() // mesh.num_replicas)
        chunks = segmented(sizes, chunk)
        counts = [part.counts for part in chunks]
        own = counts[mesh.replica] if mesh.replica < len(chunks) else []
        self._num_own = len(own)
        begin = min(mesh.replica * chunk, like.numel())
        self._own = slice(begin, begin + sum(own))
        self._worker = Codec(bits, [*chain.from_iterable(counts)], chunk, like)
        self._server = Codec(bits, own, max(1, sum(own)), like, mesh.num_replicas)
        self._scales = Scales(bits, sizes, like)
        self._own_scales = Scales(bits, own, like)
        self.mask: Tensor | None = None
        """(numel,): which elements take part. None: all of them."""
        if masked:
            self.mask = torch.ones_like(like, dtype=torch.bool)
        self.worker_error = torch.zeros_like(like)
        self.server_error = torch.zeros_like(like[self._own])
        width, most = like.element_size(), max(map(len, counts))
        self._head = most * width
        # Bytes of a row in units of scales, so that all of these are aligned.
        row = -(-(self._head + self._worker.row_bytes) // width)
        self._sent = like.new_zeros(mesh.num_replicas, row * width, dtype=torch.uint8)
        self._received = torch.zeros_like(self._sent)
        self._mine = self._sent[mesh.replica]
        tensors = [range(len(sizes))[part.segments] for part in chunks]
        self._tensors = torch.tensor([*chain.from_iterable(tensors)], device=like.device)
        places = [row * server + n for server, of in enumerate(counts) for n in range(len(of))]
        self._places = torch.tensor(places, device=like.device)

    def start(self, vector: Tensor) -> None:
        """Launch `mean_` in the background. The vector belongs to it until somebody has waited for
        the `BackgroundMean`."""
        self._mean.run(lambda: self.mean_(vector), self.bytes_per_mean())

    def mean_(self, vector: Tensor) -> None:
        """Overwrite vector (numel,) with its compressed mean, equal on all replicas. Blocking."""
        _correct(vector, self.worker_error, self.mask)
        scales = self._scales.of(vector)[self._tensors]
        self._heads(self._sent).view(-1).index_copy_(0, self._places, scales)
        codes = self._codes(self._sent, self._worker)
        self._worker.encode(vector, scales, self.mask, codes, self.worker_error)
        self._mean.exchange(dist.all_to_all_single, self._received, self._sent)
        own = vector[self._own]
        self._serve(own, None if self.mask is None else self.mask[self._own])
        self._mean.exchange(dist.all_gather_into_tensor, self._received, self._mine)
        scales = self._heads(self._received).view(-1)[self._places]
        self._worker.decode(self._codes(self._received, self._worker), scales, self.mask, vector)

    def set_mask(self, marks: Tensor) -> None:
        """Let elements take part in the means to come only where `marks` (numel,), of the vector's
        type, is 1, and not where it is 0. It must be equal on all replicas.

        The others do not count for the scales, and their mean and errors are 0. Without a mask a
        sign could not stand for 0.
        """
        assert self.mask is not None, "made without `masked`"
        self.mask.copy_(marks)
        self._scales.count(marks)
        self._own_scales.count(marks[self._own])

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
        scales = self._heads(self._received)[:, : self._num_own]
        self._server.add(self._codes(self._received, self._server), scales, own)
        _correct(own.div_(self.num_replicas), self.server_error, mask)
        scales = self._own_scales.of(own)
        self._heads(self._mine)[: self._num_own].copy_(scales)
        codes = self._codes(self._mine.unsqueeze(0), self._server)
        self._server.encode(own, scales, mask, codes, self.server_error)

    def _heads(self, messages: Tensor) -> Tensor:
        """Return messages (…, bytes) as a view in the type of scales, which are at their heads."""
        return messages.view(self.worker_error.dtype)

    def _codes(self, messages: Tensor, codec: Codec) -> Tensor:
        """Return the codes of messages (rows, bytes), as a view (rows, row bytes of the codec)."""
        return messages[:, self._head : self._head + codec.row_bytes]


def _correct(x: Tensor, error: Tensor, mask: Tensor | None) -> None:
    """Add `error` to x, and set x to 0 where the mask is false."""
    x.add_(error)
    if mask is not None:
        x.mul_(mask)
