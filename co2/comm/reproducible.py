"""Figures of a vector that have the same bits whatever the number of threads.

Replicas compute them alone, from vectors that are equal on all of them, and go on from the results:
if these differed in their last bit, the replicas would drift apart, and nothing would bring them
together. BLAS, and PyTorch where it reduces a whole vector, cut it by the number of threads, and
with that choose how the sum is rounded.
"""

import torch
from torch import Tensor

_ROW = 4096
"""Elements whose norm one thread computes; PyTorch gives 32,768 or more to several."""
_PIECE = 1 << 20
"""Elements of a checksum's temporaries."""


def row_norms(x: Tensor) -> list[Tensor]:
    """Return the norms of the rows of a vector (numel,): of the full rows, (numel // row,), and of
    the elements that are left, (1,). `squared_norm` takes them, concatenated, in place of x."""
    full = x.numel() - x.numel() % _ROW
    norm = torch.linalg.vector_norm
    return [norm(x[:full].view(-1, _ROW), dim=1), norm(x[full:], dim=0, keepdim=True)]


def squared_norm(x: Tensor) -> Tensor:
    """Return ‖x‖₂² of a vector (numel,), a scalar in fp64."""
    while x.numel() > _ROW:
        x = torch.cat(row_norms(x))
    return x.double().square_().sum()


def checksum(x: Tensor) -> Tensor:
    """Return a checksum of a tensor's bits, a scalar in int64. Integers are summed exactly, in any
    order.

    Args:
        x: of any shape and type.
    """
    x = x.detach() if x.element_size() >= 4 else x.detach().float()  # with the same values
    words = x.reshape(-1).view(torch.int32)
    # With odd and unequal weights the change of every bit changes the sum by a number of its own,
    # and changes of several words, as rounding makes them, do not cancel.
    weights = torch.arange(1, 2 * min(len(words), _PIECE) + 1, 2, device=x.device)
    found = torch.zeros((), dtype=torch.int64, device=x.device)
    for piece in words.split(_PIECE):
        found.mul_(31).add_(piece.long().mul_(weights[: len(piece)]).sum())
    return found
