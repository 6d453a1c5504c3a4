"""The mean over a group of gradients that DistributedDataParallel is told to leave alone."""

from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from co2.comm.clocks import CommTotals, Stopwatch, stopwatch


class GradientMean:
    """Averages each gradient as soon as the backward pass has it, and ends the backward pass when
    all are there.

    Args:
        params: whose gradients; in the same order on every worker of the group.
        group: over which.
        due: whether this backward pass is one after which gradients are averaged.
    """

    def __init__(
        self, params: Iterable[Tensor], group: dist.ProcessGroup, due: Callable[[], bool]
    ) -> None:
        self.params, self.group, self._due = list(params), group, due
        self._under_way: list[tuple[dist.Work, Tensor]] = []
        self._comm, self._waited = Stopwatch(), stopwatch(self.params[0].device)
        self._comm_s = self._exposed_s = 0.0
        for param in self.params:
            param.register_post_accumulate_grad_hook(self._launch)

    def _launch(self, param: Tensor) -> None:
        if not self._due():
            return
        if not self._under_way:
            self._comm.begin()
            Variable._execution_engine.queue_callback(self._finish)
        assert param.grad is not None, "it was accumulated just now"
        work = dist.all_reduce(param.grad, group=self.group, async_op=True)
        assert work is not None, "this worker is in the group"
        self._under_way.append((work, param.grad))

    def _finish(self) -> None:
        self._waited.begin()
        for work, _ in self._under_way:
            work.wait()
        self._waited.end()
        for _, grad in self._under_way:
            grad.div_(self.group.size())
        self._comm.end()
        self._under_way.clear()

    def totals(self) -> CommTotals:
        """Seconds from the first gradient of each step to the last one's mean, and those of them
        after the backward pass; no bytes. On a GPU the former are the host's."""
        self._comm_s += sum(self._comm.take())
        self._exposed_s += sum(self._waited.take())
        return CommTotals(self._comm_s, self._exposed_s)
