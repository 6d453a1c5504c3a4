"""The fused layer against the loop over experts, under Triton's interpreter. On a GPU, where
several programs run at once: tests/gpu/test_tasks.py.

The interpreter has to be chosen before Triton is imported, and the tests' own processes have done
that. So this file is a program, too, that runs with TRITON_INTERPRET=1: it reads pickled cases, and
writes what the layers make of them.
"""

import pickle
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from tasks.moe.experts import Experts, Kernel
from tests.server import ROOT, environment

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


APART = {"programs": 3, "apart": True}
CASES = {
    "two choices": Case(),
    "two choices, some left out, several programs": Case(capacity=0.6, plan=APART),
    "one choice, some left out": Case(active=1, capacity=0.6),
    "one choice, empty experts, several programs": Case(active=1, favourite=1, plan=APART),
    "an overfull expert": Case(favourite=1, capacity=0.9),
    "every expert": Case(active=3),
    "one expert": Case(active=1, experts=1),
    "more experts than 16": Case(experts=19, num_tokens=9),
    "one token, more programs than work": Case(num_tokens=1, plan={"programs": 4, "apart": True}),
    "the sizes for GPUs": Case(plan={"tokens": 64, "rows": 128, "columns": 128, "depth": 64}),
    "without gradients": Case(gradients=False),
    "bf16, some left out": Case(bf16=True, capacity=0.6),
}
POISONED = Case(poisoned=4, capacity=1.0)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, Tensor]]:
    """Results of all cases. One process makes them, because it takes seconds to start."""
    command = [sys.executable, "-m", __name__]
    cases = pickle.dumps([*CASES.values(), POISONED])
    env = environment(TRITON_INTERPRET="1")
    # A counter that never gets where it should is a program that waits forever.
    run = subprocess.run(
        command, input=cases, stdout=subprocess.PIPE, cwd=ROOT, env=env, check=True, timeout=600
    )
    return dict(zip([*CASES, "poisoned"], pickle.loads(run.stdout), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_equals_the_loop(interpreted: dict[str, dict[str, Tensor]], name: str) -> None:
    """Output, routing, losses and all gradients."""
    case, found = CASES[name], interpreted[name]
    expected = results(case, Kernel.loop)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if not value.is_floating_point():
            assert torch.equal(found[key], value), key
            continue
        # The interpreter cuts bf16 off where a GPU rounds it.
        close = (3e-2 if case.bf16 else 2e-5) * value.abs().max().clamp(min=1).item()
        assert torch.allclose(found[key], value, rtol=0, atol=close), key
    left_out = (found["wanted"] != found["counts"]).any()
    assert left_out == (case.capacity is not None)


def test_a_token_that_is_not_a_number_spoils_itself_alone(
    interpreted: dict[str, dict[str, Tensor]],
) -> None:
    """It still goes to experts that there are, so that nothing is written elsewhere."""
    found = interpreted["poisoned"]
    assert found["wanted"].sum() == 2 * POISONED.num_tokens
    assert sorted(found["choice"].tolist()) == found["choice"].sort().values.unique().tolist()
    spoilt = found["out"].isnan().any(1)
    assert spoilt[POISONED.poisoned] and spoilt.sum() == 1


POINTERS = {
    **dict.fromkeys(("x", "gate", "logits", "weight", "out"), "*fp32"),
    **dict.fromkeys(("expert", "numbers", "row", "arrived", "ready"), "*i32"),
    **dict.fromkeys(("choices", "counts", "wanted"), "*i64"),
}
COMPUTED = (
    *("inner", "inner_bias", "outer", "outer_bias", "cast", "before", "hidden", "made"),
)  # fmt: skip
NUMBERS = ("num_tokens", "num_experts", "width", "num_hidden", "most")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles_for_gpus(capability: int, dtype: torch.dtype) -> None:
    """Without one: to machine code, whose programs have no more shared memory than 99 KiB, which
    every GPU from compute capability 8.0 on has. The largest size of the task."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tasks.moe import fused_kernel
    from tasks.moe.fused_experts import PLANS

    plan = PLANS[dtype]
    computed = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}[dtype]
    constants = {
        **{"ACTIVE": 2, "CAST": dtype == torch.bfloat16, "KEEP": True, "PRECISION": "ieee"},
        **{"WIDEN": False, "FIRST": 0, "AFTER": fused_kernel.END.value, "EXPERTS": 128},
        **{"TOKENS": plan.tokens, "ROWS": plan.rows},
        **{"COLUMNS": plan.columns, "DEPTH": plan.depth},
    }
    types = {
        **dict.fromkeys(constants, "constexpr"),
        **dict.fromkeys(COMPUTED, computed),
        **dict.fromkeys(NUMBERS, "i32"),
        **POINTERS,
    }
    kernel = fused_kernel.layer
    signature = {name: types[name] for name in kernel.arg_names}
    # As at a launch with sizes that are multiples of 16.
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name not in constants and name != "ready"
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={
            "num_warps": plan.warps,
            "num_stages": plan.loads,
            "launch_cooperative_grid": True,
        },
    )
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= 99 * 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
