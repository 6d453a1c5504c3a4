"""A layer of experts whose forward pass is one Triton kernel (fused_kernel.py), for autograd.

The backward pass is plain PyTorch: a loop over experts, as `moe.kernel=loop` has it. It needs what
the kernel keeps, the first matrix's products before GELU and what the experts have made, and the
number of each expert's rows on the host.

Importing this file imports Triton.
"""

import math
from dataclasses import dataclass, replace

# `Any`: what autograd hands to and takes from a function.
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tasks.moe import fused_kernel, mlp
from tasks.moe.mlp import Weights
from tasks.moe.routing import Routing


@dataclass(frozen=True)
class Plan:
    """How the kernel's work is cut, and who does it."""

    programs: int = 1
    """Of the grid."""
    tokens: int = 64
    """In a block of the stages that work on tokens. This, rows, columns and depth are powers of 2,
    16 or more."""
    rows: int = 128
    """Of a tile of a product."""
    columns: int = 128
    depth: int = 64
    """Of the parts of the two matrices that are multiplied at once."""
    warps: int = 8
    """Of a program."""
    loads: int = 3
    """Parts that are loaded ahead, plus one."""
    apart: bool = False
    """Whether each stage is a launch of its own, which needs no barrier. So Triton's interpreter,
    which runs one program after another, can run several."""


PLANS = {torch.bfloat16: Plan(), torch.float32: Plan(rows=64, columns=64, depth=32)}
"""By the type that is computed in. A program's shared memory fits on every GPU from compute
capability 8.0 on. The sizes have not been tuned: no GPU was at hand."""


def plan(device: torch.device, dtype: torch.dtype) -> Plan:
    """A plan for a device: one program for each of a GPU's multiprocessors. Triton's interpreter
    runs one program after another, so there the first would wait forever at a barrier if it were
    not the only one."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return PLANS[dtype]
    found = torch.cuda.get_device_properties(device)
    return replace(PLANS[dtype], programs=found.multi_processor_count)


# Dynamo would have to follow the kernel's launch into an autograd function: it need not.
@torch.compiler.disable
def fused(
    tokens: Tensor,
    gate: Tensor,
    weights: Weights,
    active: int,
    capacity: float | None,
) -> tuple[Tensor, Tensor, Routing]:
    """The layer's output, what the gate's losses are made of, and who computed what.

    Args:
        tokens: [T, width], fp32 or bf16.
        gate: its weight, [E, width].
        weights: of all E experts. Under autocast they are computed in its type, otherwise in that
            of the tokens.
        active: k.
        capacity: see `route`.

    Returns:
        Weighted sums, fp32 [T, width]; the gate's logits, fp32 [T, E], with gradients too; the
        routing, without gradients. The kernel's logits are added up in an order of its own, so
        where two experts are equal within rounding it may choose another one than `route`.
    """
    device = tokens.device.type
    dtype = tokens.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    assert dtype in PLANS, "the kernel knows fp32 and bf16"
    most = active * len(tokens)
    if capacity is not None:  # in the order of `route`, because of rounding
        most = min(most, math.ceil(capacity * active * len(tokens) / len(gate)))
    options = active, most, dtype, plan(tokens.device, dtype), torch.is_grad_enabled()
    out, logits, *routed = _Layer.apply(tokens, gate, *weights, *options)
    choice, weight, counts, wanted = routed
    if capacity is not None:
        choice = choice[: int(counts.sum())]
    weight = weight.flatten()[choice]
    return out, logits, Routing(choice, weight, counts[None], wanted[None])


class _Layer(Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        gate: Tensor,
        inner: Tensor,
        inner_bias: Tensor,
        outer: Tensor,
        outer_bias: Tensor,
        active: int,
        most: int,
        dtype: torch.dtype,
        planned: Plan,
        keep: bool,
    ) -> tuple[Tensor, ...]:
        weights = inner, inner_bias, outer, outer_bias
        x, gate = tokens.contiguous(), gate.contiguous()
        cast = [weight.to(dtype).contiguous() for weight in weights]
        num_tokens, width = x.shape
        num_experts, _, num_hidden = inner.shape
        assignments, blocks = active * num_tokens, triton.cdiv(num_tokens, planned.tokens)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=x.device)

        logits, weight = empty(num_tokens, num_experts), empty(active, num_tokens)
        expert, row = (empty(active, num_tokens, dtype=torch.int32) for _ in range(2))
        numbers = empty(active * blocks, num_experts, dtype=torch.int32)
        choice = empty(assignments, dtype=torch.int64)
        counts, wanted = (empty(num_experts, dtype=torch.int64) for _ in range(2))
        hidden = empty(assignments, num_hidden, dtype=dtype)
        before = torch.empty_like(hidden) if keep else hidden
        made, out = empty(assignments, width, dtype=dtype), empty(num_tokens, width)
        x_cast = x if x.dtype == dtype else empty(num_tokens, width, dtype=dtype)
        # The barriers' counter, and one for each tile of rows.
        tiles = assignments // planned.rows + num_experts
        counters = torch.zeros(1 + tiles, dtype=torch.int32, device=x.device)
        stages = range(fused_kernel.END.value)
        launches = [(stage, stage + 1) for stage in stages] if planned.apart else [(0, len(stages))]
        exact = torch.get_float32_matmul_precision() == "highest"
        for first, after in launches:
            fused_kernel.layer[(planned.programs,)](
                *(x, gate, *cast),
                *(x_cast, logits, expert, weight, numbers, choice, row, counts, wanted),
                *(before, hidden, made, out, counters, counters[1:]),
                *(num_tokens, num_experts, width, num_hidden, most),
                ACTIVE=active,
                CAST=x_cast is not x,
                KEEP=keep,
                PRECISION="ieee" if exact else "tf32",
                WIDEN=triton.knobs.runtime.interpret,  # it takes bf16 for whole numbers there
                FIRST=first,
                AFTER=after,
                TOKENS=planned.tokens,
                EXPERTS=max(16, triton.next_power_of_2(num_experts)),
                ROWS=planned.rows,
                COLUMNS=planned.columns,
                DEPTH=planned.depth,
                num_warps=planned.warps,
                num_stages=planned.loads,
                # A program that waits for one that has no place to run would wait forever.
                launch_cooperative_grid=True,
            )
        ctx.mark_non_differentiable(choice, weight, counts, wanted)
        ctx.set_materialize_grads(False)
        if keep:
            ctx.dtypes = [each.dtype for each in weights]
            ctx.save_for_backward(
                tokens, gate, *cast, logits, expert, weight, choice, counts, before, made
            )
        return out, logits, choice, weight, counts, wanted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_logits: Tensor | None, *_: None) -> Any:
        tokens, gate, *cast, logits, expert, weight, choice, counts, before, made = (
            ctx.saved_tensors
        )
        exact = gate.float()
        d_tokens = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        sums = [torch.zeros_like(each) for each in cast]
        total = torch.zeros_like(logits) if d_logits is None else d_logits
        with torch.autocast(tokens.device.type, enabled=False):
            if d_out is not None:
                numbers = counts.tolist()
                choice = choice[: sum(numbers)]
                arriving = d_out.float()[choice % len(tokens)]  # [A, width]
                made = made[: len(choice)]
                d_weight = torch.zeros_like(weight).flatten()
                d_weight[choice] = (arriving * made).sum(-1)
                with torch.enable_grad():
                    again = logits.detach().requires_grad_()
                    shares = again.softmax(-1).gather(1, expert.T.long())
                    if len(weight) > 1:
                        shares = shares / shares.sum(-1, keepdim=True)
                    (d_gated,) = torch.autograd.grad(shares, again, d_weight.view_as(weight).T)
                total = total + d_gated
                d_made = (arriving * weight.flatten()[choice, None]).to(made.dtype)
                sent = tokens[choice % len(tokens)].to(made.dtype)
                ends = (each.split(numbers) for each in (sent, before[: len(sent)], d_made))
                parts = enumerate(zip(*ends, strict=True))
                d_sent = torch.cat(
                    [mlp.backward(cast, sums, expert, *part) for expert, part in parts]
                )
                rows = d_tokens.new_zeros(weight.numel(), tokens.shape[1])
                rows[choice] = d_sent.float()  # each has a row of its own: one order of sums
                d_tokens += rows.view(len(weight), *tokens.shape).sum(0)
            d_tokens += total @ exact
            d_gate = total.T @ tokens.float()
        back = [each.to(dtype) for each, dtype in zip(sums, ctx.dtypes, strict=True)]
        return d_tokens.to(tokens.dtype), d_gate.to(gate.dtype), *back, *[None] * 5
