"""The mean over the replicas with one bit an element on the wire, and error feedback.

    C(x) = (‖x‖₂/√n)·sign(x), sign(0) = +1            n elements that are, no padding
    worker:  x ← x + e;  send C(x);  e ← x − C(x)
    server:  the same with the mean of what arrived, for the chunk that it owns

Every replica is a worker, and the server of one chunk of ⌈numel/G⌉ elements: an all-to-all brings
each chunk to its server, an all-gather brings its compressed mean back. One scale covers a worker's
whole vector, another each server's chunk. A message is that scale and the packed signs of a chunk.
(1-bit Adam, arXiv 2102.02888, section 4; error feedback: arXiv 1901.09847.)
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from co2.dist import Mesh
from co2.trace import WAIT

_PIECE = 1 << 20
"""Elements packed at a time, which bounds the temporaries. Both ends of the wire must agree."""


class OneBitMean:
    """The blocking 1-bit mean of one vector, again and again.

    Args:
        numel: elements of the vector.
        mesh: the replicas. A single one compresses too, and sends nothing.
        group: all of them; None for one.
        dtype, device: of the vector; scales travel in this type.
    """

    def __init__(
        self,
        numel: int,
        mesh: Mesh,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        replicas = mesh.num_replicas
        self.group = group
        self.chunk = -(-numel // replicas)
        own = mesh.replica * self.chunk
        self._own = slice(min(own, numel), min(own + self.chunk, numel))
        self.worker_error = torch.zeros(numel, dtype=dtype, device=device)
        self.server_error = self.worker_error[self._own].clone()
        row = dtype.itemsize + -(-self.chunk // 8)
        self._sent = torch.zeros(replicas, row, dtype=torch.uint8, device=device)
        self._received = torch.zeros_like(self._sent)
        self._mine = self._sent[mesh.replica]
        self._piece = torch.empty(min(self.chunk, _PIECE), dtype=dtype, device=device)
        self._clock = _Clock(torch.device(device))
        self.bytes_sent = 0

    def mean_(self, vector: Tensor) -> None:
        """vector (numel,) ← its 1-bit mean over the replicas, the same on all of them."""
        vector.add_(self.worker_error)
        scale = _scale(vector)
        parts, errors = vector.split(self.chunk), self.worker_error.split(self.chunk)
        for part, error, row in zip(parts, errors, self._sent, strict=False):
            _compress(part, scale, row, error)
        self._to_servers()
        own = vector[self._own]  # its signs are on their way: room for the mean
        self._mean_of_received(own)
        own.add_(self.server_error)
        _compress(own, _scale(own), self._mine, self.server_error)
        self._from_servers()
        for part, row in zip(parts, self._received, strict=False):
            _read(row, part)

    def bytes_per_mean(self) -> int:
        """Bytes that one worker sends for one mean: to G−1 servers, and round a ring."""
        return 2 * (len(self._sent) - 1) * self._mine.numel()

    @property
    def held_bytes(self) -> int:
        """Of the errors and the messages."""
        held = (self.worker_error, self.server_error, self._sent, self._received)
        return sum(tensor.nbytes for tensor in held)

    @property
    def scratch_bytes(self) -> int:
        return self._piece.nbytes

    def clocks(self) -> dict[str, float]:
        """Totals so far. Computation stands still for all of it."""
        comm_s = self._clock.read()
        return {"comm_s": comm_s, "exposed_s": comm_s, "bytes": float(self.bytes_sent)}

    def state_dict(self) -> dict[str, Any]:
        return {"worker_error": self.worker_error, "server_error": self.server_error}

    def load_state_dict(self, state: dict[str, Any], clocks: dict[str, float]) -> None:
        self.worker_error.copy_(state["worker_error"])
        self.server_error.copy_(state["server_error"])
        self._clock.seconds, self.bytes_sent = clocks["comm_s"], int(clocks["bytes"])

    def _to_servers(self) -> None:
        if self.group is None:
            self._received.copy_(self._sent)
            return
        with self._clock.running():
            dist.all_to_all_single(self._received, self._sent, group=self.group)
        self.bytes_sent += self.bytes_per_mean()

    def _from_servers(self) -> None:
        if self.group is None:
            self._received.copy_(self._sent)
            return
        with self._clock.running():
            dist.all_gather_into_tensor(self._received.view(-1), self._mine, group=self.group)

    def _mean_of_received(self, out: Tensor) -> None:
        out.zero_()
        for row in self._received:
            scale, signs = _cut(row, out.dtype)
            for values, packed in _pieces(out, signs):
                piece = self._piece[: values.numel()]
                unpack_signs(packed, piece)
                values.add_(piece.mul_(scale))
        out.div_(len(self._received))


def pack_signs(values: Tensor, out: Tensor) -> None:
    """Signs of `values` (k,) → bits of `out` (⌈k/8⌉ or more,), uint8; 1 is plus.

    Bit b of byte j is element b·len(out) + j: whole planes are shifted, which vectorizes.
    """
    bits = torch.zeros(8 * out.numel(), dtype=torch.uint8, device=values.device)
    bits[: values.numel()].copy_(values >= 0)
    planes = bits.view(8, -1).bitwise_left_shift_(_shifts(values.device))
    torch.sum(planes, dim=0, dtype=torch.uint8, out=out)


def unpack_signs(packed: Tensor, out: Tensor) -> None:
    """What `pack_signs` made of k values → `out` (k,) of +1 and −1."""
    planes = torch.bitwise_right_shift(packed.unsqueeze(0), _shifts(packed.device))
    bits = planes.bitwise_and_(1).view(-1)
    out.copy_(bits[: out.numel()]).mul_(2).sub_(1)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device).unsqueeze(1)


def _scale(x: Tensor) -> Tensor:
    """‖x‖₂/√n as √(Σx²/n), rounded less. It stays on the device: nobody waits for a GPU.

    BLAS would add in an order that depends on where x lies, and a resumed run might differ.
    """
    squares = torch.stack([piece.square().sum() for piece in x.split(_PIECE)])
    return torch.sqrt(squares.sum() / max(x.numel(), 1))


def _compress(x: Tensor, scale: Tensor, row: Tensor, error: Tensor) -> None:
    """Message of C(x) → `row`; x − C(x) → `error`."""
    head, signs = row[: x.element_size()], row[x.element_size() :]
    head.copy_(scale.reshape(1).view(torch.uint8))
    for values, packed in _pieces(x, signs):
        pack_signs(values, packed)
    _read(row, error)
    torch.sub(x, error, out=error)


def _read(row: Tensor, out: Tensor) -> None:
    """A message → the values that it stands for."""
    scale, signs = _cut(row, out.dtype)
    for values, packed in _pieces(out, signs):
        unpack_signs(packed, values)
        values.mul_(scale)


def _cut(row: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale (1,) and signs of a message; the copy is aligned, as a row need not be."""
    return row[: dtype.itemsize].clone().view(dtype), row[dtype.itemsize :]


def _pieces(values: Tensor, signs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of a chunk beside their bytes. The last server's chunk may end early."""
    return zip(values.split(_PIECE), signs.split(_PIECE // 8), strict=False)


class _Clock:
    """Seconds of blocking collectives; on CUDA between events, read when they are past."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self._cuda = device.type == "cuda"
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def running(self) -> Iterator[None]:
        with record_function(WAIT):
            began = self._mark()
            yield
            ended = self._mark()
        if isinstance(began, float):
            self.seconds += ended - began
        else:
            self._pairs.append((began, ended))

    def read(self) -> float:
        while self._pairs and self._pairs[0][1].query():
            began, ended = self._pairs.popleft()
            self.seconds += began.elapsed_time(ended) / 1e3
        return self.seconds

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
