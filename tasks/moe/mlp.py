"""One expert's MLP, and its backward pass where autograd does not follow."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of a worker's experts: inner, inner_bias, outer, outer_bias, each [experts, ...]."""


def forward(weights: Sequence[Tensor], expert: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """What GELU sees, [rows, hidden], and what the expert makes, [rows, width]."""
    inner, inner_bias, outer, outer_bias = weights
    before = torch.addmm(inner_bias[expert], rows, inner[expert])
    hidden = F.gelu(before, approximate="tanh")
    return before, torch.addmm(outer_bias[expert], hidden, outer[expert])


def backward(
    weights: Sequence[Tensor],
    sums: Sequence[Tensor],
    expert: int,
    rows: Tensor,
    before: Tensor,
    d_made: Tensor,
) -> Tensor:
    """The gradient of an expert's rows, [rows, width].

    Args:
        weights: as `Weights`.
        sums: the weights' gradients, to which those of these rows are added.
        expert: which.
        rows: its input.
        before: what GELU has seen.
        d_made: gradient of what the expert has made.
    """
    inner, _, outer, _ = weights
    d_inner, d_inner_bias, d_outer, d_outer_bias = sums
    hidden = F.gelu(before, approximate="tanh")
    d_outer[expert].addmm_(hidden.T, d_made)
    d_outer_bias[expert] += d_made.sum(0)
    d_hidden = d_made @ outer[expert].T
    d_before = torch.ops.aten.gelu_backward(d_hidden, before, approximate="tanh")
    d_inner[expert].addmm_(rows.T, d_before)
    d_inner_bias[expert] += d_before.sum(0)
    d_rows: Tensor = d_before @ inner[expert].T
    return d_rows
