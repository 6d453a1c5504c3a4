"""Triton's kernels for compressed means against PyTorch, in Triton's interpreter; and how many
launches an exchange takes."""

import pickle
import subprocess
import sys
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import co2
from benchmarks.launches import ROUNDS, Launches, gpt2, of_gpt2, steps_of_a_round
from co2.comm import codec, sparse_mean
from tests.methods.driver import assert_same
from tests.methods.interpreted import Case, results
from tests.server import ROOT, environment

CASES = {
    "signs": Case("sign", [5, 1, 64, 1500]),
    "masked signs": Case("sign", [7, 500, 1, 493], masked=True),
    "signs in rows": Case("sign", [10, 1, 2, 13, 13, 9], rows=4),
    "signs in fp64": Case("sign", [3, 40], dtype=torch.float64),
    "int4": Case("int4", [5, 1, 64, 1500]),
    "int4 in rows": Case("int4", [10, 3, 13, 13, 9], rows=4),
    "int8": Case("int8", [700, 1, 1500]),
    "int8 in fp64": Case("int8", [3, 40], dtype=torch.float64),
    "one element": Case("int8", [1]),
    "sparse": Case("sparse", [4096 + 300, 1, 77]),
    "sparse, small tensors": Case("sparse", [7, 500, 1, 493], density=0.1),
    "all of it": Case("sparse", [300, 9], density=1.0),
    "sparse in fp64": Case("sparse", [400, 1], dtype=torch.float64),
    "what is no number": Case("sparse", [500], poisoned=True),
}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[Tensor]]:
    """Results of all cases. One process makes them, because it takes seconds to start."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.methods.interpreted"]
    cases, env = pickle.dumps([*CASES.values()]), environment(TRITON_INTERPRET="1")
    run = subprocess.run(
        command, input=cases, stdout=subprocess.PIPE, cwd=ROOT, env=env, check=True, timeout=600
    )
    return dict(zip(CASES, pickle.loads(run.stdout), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_same_bits(interpreted: dict[str, list[Tensor]], name: str) -> None:
    assert_same(interpreted[name], results(CASES[name]))


COMPRESSED = [
    "onebit_adam",
    "onebit_adam, update",
    "zero_one_adam",
    "zero_one_adam, a refresh",
    "streaming_diloco, int8",
    "streaming_diloco, int4",
    "sparseloco",
    "acco",
]
SHAPES = [(8,), (8, 24), (24,), (8, 8), (8,), (8, 32)]


def launches(name: str, tensors: int, fused: bool) -> list[str]:
    """The operators of a round of a method, for a model of so many tensors in two groups. The inner
    optimizer's step is among them."""
    registered, settings = ROUNDS[name]
    model = nn.ParameterList(torch.ones(SHAPES[n % len(SHAPES)]) for n in range(tensors))
    matrices, vectors = ([p for p in model if (p.dim() > 1) is is_] for is_ in (True, False))
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, fused=True)
    method = co2.METHODS[registered](co2.METHODS[registered].Config(**settings))
    method.prepare(model, optimizer, co2.Mesh.world())
    seen, generator = Launches(), torch.Generator().manual_seed(5)
    for step in range(4 + steps_of_a_round(name)):
        for weight in model:
            weight.grad = torch.randn(weight.shape, generator=generator)
        with ExitStack() as stack:
            if step >= 4:
                for module in (codec, sparse_mean) if fused else ():
                    stack.enter_context(patch.object(module, "kernels", seen.kernels))
                stack.enter_context(seen)
            method.step()
    method.flush()
    return seen.log


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", COMPRESSED)
def test_launches_do_not_grow_with_the_tensors(name: str, fused: bool) -> None:
    few, many = (launches(name, tensors, fused) for tensors in (20, 148))
    assert many == few
    assert len(many) < (60 if fused else 130)


@pytest.mark.parametrize("name", [name for name in ROUNDS if name != "demo"])  # some a tensor
def test_a_round_of_gpt2_takes_under_60_launches(name: str) -> None:
    """Where moments arrive late they are an exchange of their own, beside that of the weights."""
    exchanges = 2 if name == "co2, moments" else 1
    assert 0 < len(of_gpt2(name).log) < 60 * exchanges


def test_what_is_counted_is_gpt2() -> None:
    sizes = [param.numel() for param in gpt2().parameters()]
    assert (len(sizes), sum(sizes)) == (148, 124_439_808)


PACK = {"STEPS": 8, "BYTES": 128}
COMPILED: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    "_encode": ({"out": "*u8"}, {"MASKED": True, "BITS": 1, **PACK}),
    "_decode": ({"packed": "*u8"}, {"MASKED": True, "BITS": 1, **PACK}),
    "_add": ({"packed": "*u8"}, {"BITS": 4, **PACK}),
    "_choose": ({"kept": "*i64", "numbers": "*i64"}, {"COLUMNS": 4096, "NUMBER_BITS": 31}),
    "_spread": (
        {"lower": "*u8", "upper": "*u8", "magnitudes": "*fp32", "kept": "*i64"},
        {"SIGN": -1, "SLOTS": 128},
    ),
}
"""The types of a kernel's pointers, but for those of `POINTERS`, and its constants."""
INTEGERS = dict.fromkeys(("starts", "widths", "firsts"), "*i64")
FLOATS = dict.fromkeys(("x", "scales", "out", "error", "magnitudes"), "*fp32")
POINTERS = {**INTEGERS, **FLOATS, "mask": "*i1"}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_for_gpus(name: str, capability: int) -> None:
    """Without one; and no product and sum are rounded together, which would be other bits."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from co2.comm import kernels

    kernel = getattr(kernels, name)
    own, constants = COMPILED[name]
    types = {**POINTERS, **own, **dict.fromkeys(constants, "constexpr")}
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants),
        target=GPUTarget("cuda", capability, 32),
        options={"enable_fp_fusion": False},
    )
    assert compiled.asm["cubin"]
    assert "fma." not in compiled.asm["ptx"]
