"""Layers of experts under Triton's interpreter, as a program that runs with TRITON_INTERPRET=1.

The interpreter has to be chosen before Triton is imported, and the tests' own processes have done
that. So this one reads pickled cases, and writes what the layers make of them.
"""

import pickle
import sys
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tasks.moe.experts import Experts, Kernel

WIDTH = 18


@dataclass
class Case:
    """A layer and its tokens. No size is a multiple of a tile's."""

    active: int = 2
    capacity: float | None = None
    experts: int = 3
    plan: dict[str, int | bool] = field(default_factory=dict)
    """Fields of `Plan`; tiles are small unless it says otherwise."""
    bf16: bool = False
    """Under autocast."""
    favourite: int | None = None
    """An expert that all tokens want first."""
    poisoned: int | None = None
    """A token that is not a number."""
    num_tokens: int = 23
    gradients: bool = True


def layer(case: Case, kernel: Kernel) -> Experts:
    torch.manual_seed(case.active)
    stds = (0.3, 0.3)
    capacity = case.capacity
    made = Experts(WIDTH, 20, case.experts, case.active, capacity, False, stds, 0.0, kernel=kernel)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(weight, std=0.3)
        if case.favourite is not None:
            made.gate.weight[case.favourite, 0] = 50
    return made


def results(case: Case, kernel: Kernel) -> dict[str, Tensor]:
    """Output, routing, losses, and all gradients of a loss that has all of these in it."""
    made = layer(case, kernel)
    numbers = torch.Generator().manual_seed(9)
    x = torch.randn(case.num_tokens, WIDTH, generator=numbers)
    x[:, 0] = x[:, 0].abs() + 0.1
    if case.poisoned is not None:
        x[case.poisoned] = torch.nan
    weights = torch.randn(x.shape, generator=numbers)
    x.requires_grad_()
    half = torch.autocast("cpu", torch.bfloat16, enabled=case.bf16)
    with torch.set_grad_enabled(case.gradients), half:
        out = made(x)
    balance, z = made.losses
    inputs = {"x": x, **dict(made.named_parameters())} if case.gradients else {}
    found: tuple[Tensor, ...] = ()
    if inputs:
        loss = (out * weights).sum() + balance + z
        found = torch.autograd.grad(loss, list(inputs.values()))
    routing = made.routing
    assert routing is not None
    return {
        "out": out.detach(),
        "balance": balance.detach(),
        "z": z.detach(),
        "choice": routing.choice,
        "weight": routing.weight.detach(),
        "counts": routing.counts,
        "wanted": routing.wanted,
        **{f"d {name}": each for name, each in zip(inputs, found, strict=True)},
    }


def main() -> None:
    from tasks.moe import fused_experts

    found = []
    for case in pickle.load(sys.stdin.buffer):
        small = {"tokens": 16, "rows": 16, "columns": 16, "depth": 16}
        chosen = fused_experts.Plan(**{**small, **case.plan})
        fused_experts.plan = lambda *_, chosen=chosen: chosen
        found.append(results(case, Kernel.fused))
    pickle.dump(found, sys.stdout.buffer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
