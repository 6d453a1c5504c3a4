"""`moe.kernel=loop` inside of compiled code: one operator, which torch.compile does not look into.

How many rows an expert has stands in the data alone, so the loop of tasks/moe/experts.py would
break the graph several times in every layer. What this operator makes is the same, bit for bit.
"""

from typing import Any

import torch
from torch import Tensor

from tasks.moe import mlp


@torch.library.custom_op("co2_moe::looped", mutates_args=())
def looped(
    rows: Tensor,
    counts: Tensor,
    inner: Tensor,
    inner_bias: Tensor,
    outer: Tensor,
    outer_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """What GELU sees, [A, hidden], and what the experts make, [A, width].

    Args:
        rows: [A, width], in the order of the experts. Of rows beyond the last expert's nothing is
            made: zeros.
        counts: int64 [E], rows of each expert.
        inner, inner_bias, outer, outer_bias: of all experts, of the rows' type.
    """
    weights = inner, inner_bias, outer, outer_bias
    before, made = rows.new_zeros(len(rows), inner.shape[2]), torch.zeros_like(rows)
    for expert, part in enumerate(_parts(counts)):
        before[part], made[part] = mlp.forward(weights, expert, rows[part])
    return before, made


@torch.library.custom_op("co2_moe::looped_backward", mutates_args=())
def looped_backward(
    d_made: Tensor,
    rows: Tensor,
    before: Tensor,
    counts: Tensor,
    inner: Tensor,
    inner_bias: Tensor,
    outer: Tensor,
    outer_bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of rows and weights."""
    weights = inner, inner_bias, outer, outer_bias
    d_inner, d_inner_bias, d_outer, d_outer_bias = sums = tuple(map(torch.zeros_like, weights))
    d_rows = torch.zeros_like(rows)
    for expert, part in enumerate(_parts(counts)):
        d_rows[part] = mlp.backward(weights, sums, expert, rows[part], before[part], d_made[part])
    return d_rows, d_inner, d_inner_bias, d_outer, d_outer_bias


def _parts(counts: Tensor) -> list[slice]:
    numbers = counts.tolist()
    ends = [sum(numbers[: expert + 1]) for expert in range(len(numbers))]
    return [slice(end - number, end) for number, end in zip(numbers, ends, strict=True)]


# `Any`: what autograd hands to and takes from an operator.
def _like(rows: Tensor, counts: Tensor, inner: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(len(rows), inner.shape[2]), torch.empty_like(rows)


def _like_backward(
    d_made: Tensor, rows: Tensor, before: Tensor, counts: Tensor, *weights: Tensor
) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, (rows, *weights)))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, *others = inputs
    ctx.save_for_backward(rows, output[0], *others)


def _backward(ctx: Any, _: Tensor, d_made: Tensor) -> tuple[Tensor | None, ...]:
    d_rows, *sums = looped_backward(d_made.contiguous(), *ctx.saved_tensors)
    return (d_rows, None, *sums)


looped.register_fake(_like)
looped_backward.register_fake(_like_backward)
looped.register_autograd(_backward, setup_context=_keep)
