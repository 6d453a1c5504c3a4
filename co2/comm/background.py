"""BackgroundMean: a private snapshot, one collective in flight, and a wait.

Live parameters are never touched by a collective. Nothing here decides when to communicate:
`start` and `wait` are called by the method at steps that are the same on every worker.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from co2.comm.collectives import carries
from co2.comm.mesh import Mesh
from co2.comm.phases import WAIT
from co2.config import CommConfig, Precision
from co2.errors import require


class BackgroundMean:
    """The mean of a vector over the replicas, taken in the background.

    Args:
        numel: elements of the vector.
        mesh: the replicas. With one replica the mean is the vector and nothing is sent.
        config: bucket size, and whether bf16 travels: the buffer has that type then.
        dtype, device: of the vector. In the host's memory gloo carries it, wherever the model is.
    Raises:
        ConfigError: the vector is on a GPU, and the process group carries the host's memory only.
    """

    def __init__(
        self,
        numel: int,
        mesh: Mesh,
        config: CommConfig | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        config = config or CommConfig()
        if config.dtype is Precision.bf16:
            dtype = torch.bfloat16
        self.buffer = torch.zeros(numel, dtype=dtype, device=device)
        self.in_flight = False
        self.bytes_sent = 0
        self.num_replicas = mesh.num_replicas
        self.group = mesh.new_group_across_replicas(
            None if self.buffer.device.type == mesh.device.type else "gloo"
        )
        hint = "the process group is gloo's, for host memory; use cpu, or a group with nccl"
        require(carries(self.group, self.buffer), "comm.device", config.device.name, hint)
        bucket = max(1, int(config.bucket_mb * 2**20) // self.buffer.element_size())
        self._buckets = self.buffer.split(bucket)
        self._lane = _CudaLane() if self.buffer.is_cuda else _HostLane()

    def start(self, vector: Tensor | None = None) -> None:
        """Launch the mean of `vector`, copied first; or of what the caller put into `buffer`.

        From here to `wait` the buffer belongs to the collective.
        """
        self._depart()
        if vector is not None:
            self.buffer.copy_(vector)
        if self.num_replicas > 1 and self.buffer.numel() > 0:
            self._lane.launch(self._buckets, self.group)

    def run(self, sequence: Callable[[], None], num_bytes: int | None = None) -> None:
        """Launch `sequence` in place of a mean: blocking collectives of `group`, and arithmetic
        between them. `num_bytes` is what this worker sends in it; None: as much as for a mean.

        On a CPU a thread carries it on, and an error in it is raised by `wait`; on CUDA it is
        queued here, on a stream of its own. A single replica runs it here.
        """
        self._depart(num_bytes)
        if self.num_replicas > 1:
            self._lane.run(sequence)
        else:
            sequence()

    def mean_now(self) -> Tensor:
        """Start with what is in `buffer` and wait: the blocking mean."""
        self.start()
        mean = self.wait()
        assert mean is not None
        return mean

    def wait(self) -> Tensor | None:
        """What was started last, in `buffer`; None if nothing was."""
        if not self.in_flight:
            return None
        with record_function(WAIT):
            self._lane.wait()
        self.in_flight = False
        return self.buffer

    def close(self) -> None:
        """Wait for what is in flight and let go of the process group; nothing starts after it.

        Destroying the group then joins its threads, which would else live on to the exit.
        """
        try:
            self.wait()
        finally:
            self._lane.close()
            self.group = None

    def bytes_per_mean(self) -> int:
        """Bytes that one worker sends for one mean: a ring sends 2(G−1)/G of the vector."""
        payload = self.buffer.numel() * self.buffer.element_size()
        return 2 * (self.num_replicas - 1) * payload // self.num_replicas

    def clocks(self) -> dict[str, float]:
        """Totals so far: comm_s, launch to completion; exposed_s, computation standing still."""
        comm_s, exposed_s = self._lane.clocks()
        return {"comm_s": comm_s, "exposed_s": exposed_s, "bytes": float(self.bytes_sent)}

    def join(self) -> None:
        """See what is in flight to its end; it stays due."""
        self._lane.wait(count=False)

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from here; what is in flight is brought in."""
        self.join()
        return {
            "in_flight": self.in_flight,
            "buffer": self.buffer if self.in_flight else None,
            **self.clocks(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.in_flight = state["in_flight"]
        if self.in_flight:
            self.buffer.copy_(state["buffer"])
        self.bytes_sent = int(state["bytes"])
        self._lane.comm_s, self._lane.exposed_s = state["comm_s"], state["exposed_s"]

    def _depart(self, num_bytes: int | None = None) -> None:
        assert not self.in_flight, "the previous mean was not waited for"
        assert self.num_replicas == 1 or self.group is not None, "closed by flush"
        self.in_flight = True
        self.bytes_sent += self.bytes_per_mean() if num_bytes is None else num_bytes


class _HostLane:
    """CPU: gloo's own threads carry a mean, and a future's callback reads the clock. A sequence
    has one thread of ours, which does not start before the first."""

    def __init__(self) -> None:
        self.comm_s = self.exposed_s = 0.0
        self._works: list[dist.Work] = []
        self._clocked: torch.futures.Future | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="co2")
        self._carried: Future[None] | None = None

    def launch(self, buckets: tuple[Tensor, ...], group: dist.ProcessGroup | None) -> None:
        began = time.perf_counter()
        self._works = [_all_reduce(bucket, group) for bucket in buckets]

        def completed(_: object) -> None:
            self.comm_s += time.perf_counter() - began

        futures = [work.get_future() for work in self._works]
        self._clocked = torch.futures.collect_all(futures).then(completed)

    def run(self, sequence: Callable[[], None]) -> None:
        began = time.perf_counter()

        def timed() -> None:
            sequence()
            self.comm_s += time.perf_counter() - began

        self._carried = self._thread.submit(timed)

    def wait(self, count: bool = True) -> None:
        began = time.perf_counter()
        carried, self._carried = self._carried, None
        if carried is not None:
            carried.result()
        for work in self._works:
            work.wait()
        if self._clocked is not None:
            # gloo's thread must be out of Python: one caught there at exit aborts the process.
            self._clocked.wait()
        self._works, self._clocked = [], None
        if count:
            self.exposed_s += time.perf_counter() - began

    def clocks(self) -> tuple[float, float]:
        return self.comm_s, self.exposed_s

    def close(self) -> None:
        self._thread.shutdown()  # joins: like gloo's, ours must not meet the exit in a collective


class _CudaLane:
    """CUDA: a stream of its own carries what is launched; events are read when they are past."""

    def __init__(self) -> None:
        self.comm_s = self.exposed_s = 0.0
        self._stream = torch.cuda.Stream()
        self._arrived: torch.cuda.Event | None = None
        self._pairs: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    def launch(self, buckets: tuple[Tensor, ...], group: dist.ProcessGroup | None) -> None:
        def mean() -> None:
            works = [_all_reduce(bucket, group) for bucket in buckets]
            for work in works:
                work.wait()  # orders this stream behind the collective; the host goes on

        self.run(mean)

    def run(self, sequence: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())  # the snapshot comes first
        with torch.cuda.stream(self._stream):
            began = _mark()
            sequence()
            self._arrived = _mark()
        self._pairs.append(("comm_s", began, self._arrived))

    def wait(self, count: bool = True) -> None:
        if self._arrived is None:
            return
        before = _mark()
        torch.cuda.current_stream().wait_event(self._arrived)
        self._arrived = None
        if count:
            self._pairs.append(("exposed_s", before, _mark()))

    def clocks(self) -> tuple[float, float]:
        while self._pairs and self._pairs[0][2].query():
            name, began, ended = self._pairs.popleft()
            setattr(self, name, getattr(self, name) + began.elapsed_time(ended) / 1e3)
        return self.comm_s, self.exposed_s

    def close(self) -> None:
        """No thread is held."""


def _all_reduce(bucket: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    return dist.all_reduce(bucket, op=dist.ReduceOp.AVG, group=group, async_op=True)


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
