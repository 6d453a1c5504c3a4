"""Stopping together: a signal reaches one worker, and all stop after the same step."""

import signal
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from co2.comm.mesh import Mesh


class StopVote:
    """Agrees in the background on the step after which every worker stops.

    After each step every worker sends one flag, "I was told to stop", and reads the outcome of
    the flags sent `lag` steps before. With `lag` no smaller than what one replica may run ahead
    of another anyway, nobody ever stands still for it. A stop takes effect `lag` steps later.
    `lag` is asked for at every step, and must be the same on every worker then.

    Use as a context manager: the signals' former handlers and mask return at its end.
    """

    def __init__(
        self,
        mesh: Mesh,
        group: dist.ProcessGroup | None,
        lag: Callable[[], int],
        signals: Iterable[signal.Signals],
    ) -> None:
        self.told = False
        self._alone = mesh.num_workers == 1
        self._group, self._lag, self._signals = group, lag, tuple(signals)
        self._pending: deque[tuple[torch.Tensor, dist.Work]] = deque()

    def __enter__(self) -> "StopVote":
        self._before = {number: signal.signal(number, self._tell) for number in self._signals}
        # The launcher keeps them blocked until somebody is here to take them.
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # First the mask: a launcher's signal now waits, where it would end the last evaluation.
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        """Once after every step, on every worker: whether to stop now."""
        if self._alone:
            return self.told
        flag = torch.tensor([int(self.told)])
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending.append((flag, work))
        outcomes = []
        while len(self._pending) > self._lag():
            outcomes.append(self._oldest())
        return any(outcomes)

    def drain(self) -> None:
        """Wait for the flags under way, before the process group goes."""
        while self._pending:
            self._oldest()

    def _oldest(self) -> bool:
        flag, work = self._pending.popleft()
        work.wait()
        return bool(flag.item())

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self.told = True
