"""Tokens that travel to the experts of other workers, and back."""

# `Any`: what autograd hands to and takes from a function.
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


def all_to_all(
    rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send rows to the workers of a group, and return theirs. Collective; its gradients travel the
    same way back.

    Args:
        rows: [A, width], first those for the first worker.
        received: how many rows come from each worker.
        sent: how many go to each.
    """
    result: Tensor = _AllToAll.apply(rows, received, sent, group)
    return result


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.way = received, sent, group
        return _exchanged(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        received, sent, group = ctx.way
        return _exchanged(gradients[0], sent, received, group), None, None, None


def _exchanged(
    rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> Tensor:
    came = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(came, rows.contiguous(), received, sent, group=group)
    return came
