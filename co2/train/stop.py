"""Stopping together: a signal reaches one worker, and all stop after the same step."""

import signal
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from co2.comm import profiled
from co2.comm.mesh import Mesh
from co2.elastic.replicas import replicas_of


class StopVote:
    """Agrees in the background on the step after which every worker stops.

    After each step every worker sends one flag, which says whether it has received a signal, and
    reads the outcome of the flags that were sent `max_skew_steps` steps before. One replica may run
    that far ahead of another anyway, so no worker ever waits for a flag. A stop takes effect
    `max_skew_steps` steps after the signal. Where replicas may come and go they agree as a round
    ends (co2/elastic/members.py).

    Used as a context manager it puts back the signals' former handlers and mask at its end.

    Args:
        mesh: of the workers.
        group: a CPU group of all workers; None for one.
        max_skew_steps: called after every step; must return the same on every worker then.
        signals: that ask for a stop.
    """

    def __init__(
        self,
        mesh: Mesh,
        group: dist.ProcessGroup | None,
        max_skew_steps: Callable[[], int],
        signals: Iterable[signal.Signals],
    ) -> None:
        self.received = False
        self._alone, replicas = mesh.num_workers == 1, replicas_of(mesh)
        self._members = None if replicas is None else replicas.members
        self._group, self._signals = group, tuple(signals)
        self._max_skew_steps = max_skew_steps
        self._pending: deque[tuple[torch.Tensor, dist.Work]] = deque()

    def __enter__(self) -> "StopVote":
        self._before = {number: signal.signal(number, self._receive) for number in self._signals}
        # The launcher keeps them blocked until there is a handler.
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The mask comes first: a signal from the launcher would end the last evaluation; now it
        # waits.
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        """Whether to stop now. Called once after every step, on every worker."""
        if self._members is not None:
            if self.received:
                self._members.ask_to_stop()
            return self._members.stop_due
        if self._alone:
            return self.received
        flag = torch.tensor([int(self.received)])
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending.append((flag, profiled.note(work, self._group)))
        outcomes = []
        while len(self._pending) > self._max_skew_steps():
            outcomes.append(self._oldest())
        return any(outcomes)

    def drain(self) -> None:
        """Wait for the flags under way, before the process group is destroyed."""
        while self._pending:
            self._oldest()

    def _oldest(self) -> bool:
        flag, work = self._pending.popleft()
        work.wait()
        return bool(flag.item())

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
