"""How long communication takes, and how long computation stands still for it.

The same for every method:

    comm_s       from the launch of a collective to its completion, summed over all collectives
    exposed_s    from where a worker needs a result until it may go on: the rest of the collective,
                 the agreement of replicas that come and go, and a recovery where one is lost; not
                 copies, nor the arithmetic of an outer step, which are computation
    train_s      from the end of a step to the end of the next, without pauses: evaluations,
                 checkpoints, the writing of figures. A GPU has done its work before a pause

AllReduce has both from PyTorch, which samples them. A peer (co2_measure/peers) blocks, so both are
the time in its calls that wait for others.

Nothing here makes the host wait for a GPU: what a GPU has not finished is counted later. torch is
imported only where a GPU is timed, because the simulator uses `overlap` and needs no torch.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CommTotals:
    """What the communication of one worker has cost since the start of training. See above."""

    comm_s: float = 0.0
    exposed_s: float = 0.0
    bytes_sent: float = 0.0
    """Bytes that this worker has sent."""

    def __add__(self, other: CommTotals) -> CommTotals:
        return CommTotals(
            self.comm_s + other.comm_s,
            self.exposed_s + other.exposed_s,
            self.bytes_sent + other.bytes_sent,
        )


@dataclass(frozen=True)
class ExchangeTotals:
    """What the exchange inside a replica has cost one worker."""

    comm: CommTotals = CommTotals()
    behind_s: float = 0.0
    """Seconds of computation behind which it could hide; 0 where nothing was to hide it."""

    def __add__(self, other: ExchangeTotals) -> ExchangeTotals:
        return ExchangeTotals(self.comm + other.comm, self.behind_s + other.behind_s)


def overlap(comm_s: float, exposed_s: float) -> float | None:
    """Share of the communication during which computation went on; None without communication."""
    return max(0.0, 1 - exposed_s / comm_s) if comm_s > 0 else None


class Stopwatch:
    """Measures one span of the host's time after another. One thread may end a span while another
    takes those before."""

    def __init__(self) -> None:
        self._began: Any = None
        self._spans: deque[tuple[Any, Any]] = deque()

    def begin(self) -> None:
        """A span begins. One that has begun already is dropped."""
        self._began = self._now()

    def end(self) -> None:
        """The span that began last ends. Without one, nothing happens."""
        if self._began is not None:
            self._spans.append((self._began, self._now()))
            self._began = None

    def take(self) -> list[float]:
        """Seconds of the spans that have ended since the last call."""
        spans = [self._spans.popleft() for _ in range(len(self._spans))]
        return [ended - began for began, ended in spans]

    def _now(self) -> Any:
        return time.perf_counter()


class CudaStopwatch(Stopwatch):
    """Time of a GPU, on the stream that is current when a span begins or ends. A span can be taken
    once the GPU has reached its end."""

    def _now(self) -> torch.cuda.Event:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> list[float]:
        seconds = []
        while self._spans and self._spans[0][1].query():
            began, ended = self._spans.popleft()
            seconds.append(began.elapsed_time(ended) / 1e3)
        return seconds


def stopwatch(device: torch.device) -> Stopwatch:
    """A stopwatch for work on this device."""
    return CudaStopwatch() if device.type == "cuda" else Stopwatch()
