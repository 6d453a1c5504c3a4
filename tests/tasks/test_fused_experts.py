"""The fused layer against the loop over experts, in Triton's interpreter. On a GPU, where several
programs run at the same time: tests/gpu/test_experts.py."""

import pickle
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tasks.moe.experts import Kernel
from tests.server import ROOT, environment
from tests.tasks.interpreted import Case, results

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
    command = [sys.executable, "-m", "tests.tasks.interpreted"]
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
