"""BackgroundMean: a private snapshot, one collective in flight, and a wait for its result.

No collective touches live parameters. The method calls `start` and `wait` at steps that are the
same on every worker. The snapshot is `buffer`, which the method fills itself, often with one pass
over its other vectors; a copy made in `start` would cost another vector as long as the model.

Where replicas come and go, `new_mean` makes a mean that recovers inside `wait`
(co2/elastic/replicas.py). A method sees no difference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from co2.comm.clocks import CommTotals
from co2.comm.collectives import carries
from co2.comm.deadlocks import DeadlockWatch
from co2.comm.mesh import Mesh, backend_of
from co2.comm.phases import WAIT
from co2.comm.runners import CudaRunner, HostRunner, Runner
from co2.config import CommConfig, Precision
from co2.errors import require


@dataclass(frozen=True)
class Arriving:
    """In a state: a buffer that a collective still writes."""

    buffer: Tensor
    copy: Callable[[Tensor, Tensor], Callable[[], object]]
    """Copies the first tensor, the buffer or a part of it, into the second, of its size and type,
    as soon as the collective is over, and before anybody else can change it. Called by the thread
    that trains, while the state is new. What it returns waits for the copy, in any thread, and
    raises `RuntimeError` if the collective has failed."""

    def part(self, first: int, last: int) -> "Arriving":
        """These elements of it."""
        return Arriving(self.buffer[first:last], self.copy)


class BackgroundMean:
    """The mean of a vector over the replicas, taken in the background.

    Args:
        numel: elements of the vector.
        mesh: the replicas. With one replica the mean is the vector itself, and nothing is sent.
        config: the size of a bucket, and whether bf16 travels: the buffer then has that type.
        dtype, device: those of the vector. In the host's memory gloo carries it, wherever the
            model is.
        beside: a mean made before, whose process group serves this one too, so that no worker holds
            connections more. The two may not be under way together. None: a group of its own.
    Raises:
        ConfigError: the vector is on a GPU, but the process group reaches only the host's memory.
    """

    def __init__(
        self,
        numel: int,
        mesh: Mesh,
        config: CommConfig | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        beside: "BackgroundMean | None" = None,
    ) -> None:
        config = config or CommConfig()
        if config.dtype is Precision.bf16:
            dtype = torch.bfloat16
        self.buffer = torch.zeros(numel, dtype=dtype, device=device)
        self.in_flight = False
        """Whether a result is due: it was started and has not been waited for."""
        self.is_equal = False
        """Whether what was started last gives all replicas the same bits, as a mean does. A
        sequence may leave each of them others."""
        self._max_ctas, self._beside = config.max_ctas, beside
        self._make_group(mesh)
        hint = "the process group is gloo's, for host memory; use cpu, or a group with nccl"
        require(carries(self.group, self.buffer), "comm.device", config.device.name, hint)
        bucket = max(1, int(config.bucket_mb * 2**20) // self.buffer.element_size())
        self._buckets = self.buffer.split(bucket)
        self._runner: Runner = CudaRunner() if self.buffer.is_cuda else HostRunner()
        self._sequence = False
        """Whether a sequence (`run`) is pending, not a mean."""
        self._comm_s = self._exposed_s = 0.0
        self._bytes_sent = 0

    def _make_group(self, mesh: Mesh) -> None:
        """Make the process group of these replicas. Collective."""
        self.num_replicas = mesh.num_replicas
        self.group: dist.ProcessGroup | None
        if self._beside is not None:
            self.group = self._beside.group
            return
        backend = backend_of(self.buffer.device.type)
        self.group = mesh.new_group_across_replicas(backend, self._max_ctas)

    def watched_by(self, watch: DeadlockWatch) -> None:
        """Wait for collectives by the watch of the method that starts them."""
        self._runner.watch = watch

    def start(self, vector: Tensor | None = None) -> None:
        """Launch the mean of `vector`, which is copied first; None: of what `buffer` holds.

        From here to `wait` the buffer belongs to the collective.
        """
        self._depart()
        self.is_equal = True
        if vector is not None:
            self.buffer.copy_(vector)
        if self._travels:
            self._runner.launch(self._buckets, self.group, None)

    @property
    def _travels(self) -> bool:
        return self.num_replicas > 1 and self.buffer.numel() > 0

    def run(self, sequence: Callable[[], None], num_bytes: int | None = None) -> None:
        """Launch `sequence` in place of a mean: blocking collectives of `group`, with arithmetic
        between them.

        On a CPU a thread runs it, and `wait` raises an error that occurs in it. On CUDA it is
        queued here, on a stream of its own. A single replica runs it at once.

        Args:
            sequence: leaves its result in `buffer`.
            num_bytes: what this worker sends in it; None: as much as for a mean.
        """
        self._depart(num_bytes)
        self._sequence = True
        if self.num_replicas > 1:
            self._runner.run(sequence)
        else:
            sequence()

    def mark_arrived(self) -> None:
        """Make what the caller has put into `buffer` the result of the next `wait`. Nothing is
        sent."""
        self._depart(num_bytes=0)

    def mean_now(self) -> Tensor:
        """Take the mean of what `buffer` holds, and wait for it: the blocking mean."""
        self.start()
        mean = self.wait()
        assert mean is not None
        return mean

    def wait(self) -> Tensor | None:
        """Wait for what was started last and return it, in `buffer`; None if nothing was."""
        if not self.in_flight:
            return None
        with record_function(WAIT):
            self._arrive()
        self.in_flight = False
        return self.buffer

    def _arrive(self) -> None:
        """Wait for what is in flight, which is exposed communication."""
        self._runner.wait()

    def peek(self) -> None:
        """Wait until what is in flight is in `buffer`, without taking it: the next `wait` still
        returns it. This wait does not count as exposed."""
        self._runner.wait(count=False)

    def close(self) -> None:
        """Wait for what is in flight, which stays due, and release the process group, which else
        could not join its threads when it is destroyed. Nothing starts after it."""
        try:
            if self.in_flight:
                with record_function(WAIT):
                    self._arrive()
        finally:
            self._runner.close()
            self.group = None

    def bytes_per_mean(self) -> int:
        """Bytes that one worker sends for one mean: a ring sends 2(G−1)/G of the vector."""
        payload = self.buffer.numel() * self.buffer.element_size()
        return 2 * (self.num_replicas - 1) * payload // self.num_replicas

    def exchange(self, collective: Callable[..., Any], received: Tensor, sent: Tensor) -> None:
        """Within a sequence: run a collective that fills one tensor from another. A single replica
        receives what it has sent."""
        if self.num_replicas == 1:
            received.view(-1).copy_(sent.view(-1))
        else:
            collective(received.view(-1), sent.view(-1), group=self.group)

    def totals(self) -> CommTotals:
        """Totals so far. What a GPU has not finished is not in them yet."""
        self._comm_s += sum(self._runner.comm.take())
        self._exposed_s += sum(self._runner.exposed.take())
        return CommTotals(self._comm_s, self._exposed_s, float(self._bytes_sent))

    def state_dict(self, arriving: bool = False) -> dict[str, Any]:
        """Everything to go on from here. Joins what is in flight, and has the buffer only then.

        Args:
            arriving: put `Arriving` in place of the buffer of a mean in flight; `comm_s` then lacks
                it. A sequence (`run`) is joined all the same, because it may change more.
        """
        buffer: Tensor | Arriving = self.buffer
        if arriving and not self._sequence:
            buffer = Arriving(self.buffer, self._runner.copy)
        else:
            self.peek()
        totals = self.totals()
        return {
            "in_flight": self.in_flight,
            "buffer": buffer if self.in_flight else None,
            "equal": self.is_equal,
            "comm_s": totals.comm_s,
            "exposed_s": totals.exposed_s,
            "bytes_sent": self._bytes_sent,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.in_flight:
            self._runner.wait(count=False)  # else it would still write the buffer
        self.in_flight = state["in_flight"]
        if self.in_flight:
            self.buffer.copy_(state["buffer"])
        self.is_equal = state.get("equal", False)  # an older version may have saved it
        self.totals()  # what was not counted yet is of the training that is left
        self._comm_s, self._exposed_s = state["comm_s"], state["exposed_s"]
        self._bytes_sent = state["bytes_sent"]

    def _depart(self, num_bytes: int | None = None) -> None:
        assert self.num_replicas == 1 or self.group is not None, "closed by flush"
        assert not self.in_flight, "the previous mean was not waited for"
        self.in_flight, self._sequence, self.is_equal = True, False, False
        self._bytes_sent += self.bytes_per_mean() if num_bytes is None else num_bytes


def new_mean(numel: int, mesh: Mesh, *others: Any, **more: Any) -> BackgroundMean:
    """Make a mean for these replicas, which recovers if they may be lost. The others are arguments
    of `BackgroundMean`."""
    if mesh.elastic is None:
        return BackgroundMean(numel, mesh, *others, **more)
    mean = mesh.elastic.new_mean(numel, mesh, *others, **more)
    assert isinstance(mean, BackgroundMean)
    return mean
