"""Kernels of the layer of experts on a GPU, where several programs run at the same time.

The arithmetic of the fused one is also tested without a GPU: tests/tasks/test_fused_experts.py.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tasks.moe.experts import Exchange, Experts, Kernel
from tasks.moe.moe import nvshmem_available
from tests.workers import Pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

WIDTH, HIDDEN, TOKENS = 200, 328, 3001
"""No multiples of a tile's; rows of 16 bytes, as grouped GEMMs need them."""


@pytest.fixture(autouse=True)
def exact_products() -> None:
    assert torch.get_float32_matmul_precision() == "highest"


def layer(kernel: Kernel, active: int, capacity: float | None, experts: int = 8) -> Experts:
    torch.manual_seed(active)
    shape = (WIDTH, HIDDEN, experts, active, capacity, False, (0.1, 0.1), 0.0)
    made = Experts(*shape, kernel=kernel)
    for name, weight in made.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(weight, std=0.1)
    return made.cuda()


def tokens(number: int = TOKENS) -> Tensor:
    numbers = torch.Generator().manual_seed(9)
    return torch.randn(number, WIDTH, generator=numbers).cuda()


def results(made: Experts, x: Tensor, bf16: bool) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        out = made(x)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).cuda()
    inputs = {"x": x, **dict(made.named_parameters())}
    balance, z = made.losses
    loss = (out * weights).sum() + balance + z
    gradients = torch.autograd.grad(loss, list(inputs.values()))
    named = {f"d {name}": each for name, each in zip(inputs, gradients, strict=True)}
    return {"out": out.detach(), "balance": balance.detach(), "z": z.detach(), **named}


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor], bf16: bool) -> None:
    for key, value in expected.items():
        close = (3e-2 if bf16 else 1e-4) * value.abs().max().clamp(min=1).item()
        assert torch.allclose(found[key], value, rtol=0, atol=close), key


@pytest.mark.parametrize("kernel", [Kernel.grouped, Kernel.fused])
@pytest.mark.parametrize("active", [1, 2])
@pytest.mark.parametrize("capacity", [None, 0.7])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("experts", [8, 64])
def test_equals_the_loop(
    kernel: Kernel, active: int, capacity: float | None, bf16: bool, experts: int
) -> None:
    """Output, losses and all gradients; and the routing, but for tokens whose experts are equal
    within rounding, of which there are none here."""
    x, made = tokens(), [layer(each, active, capacity, experts) for each in (Kernel.loop, kernel)]
    expected, found = (results(each, x, bf16) for each in made)
    for key in ("choice", "counts", "wanted"):
        one, other = (getattr(each.routing, key) for each in made)
        assert torch.equal(one, other), key
    assert_alike(found, expected, bf16)


@pytest.mark.parametrize("kernel", [Kernel.grouped, Kernel.fused])
@pytest.mark.parametrize("bf16", [False, True])
def test_empty_and_overfull_experts(kernel: Kernel, bf16: bool) -> None:
    x, found = tokens().abs(), []
    for each in (Kernel.loop, kernel):
        made = layer(each, 1, 3.0)
        nn.init.zeros_(made.gate.weight)
        nn.init.ones_(made.gate.weight[3])
        found.append(results(made, x, bf16))
        assert made.routing.wanted[0, 3] == TOKENS and made.routing.counts.sum() < TOKENS
    assert_alike(found[1], found[0], bf16)
    assert not found[1]["d inner"][:3].any()


@pytest.mark.parametrize("bf16", [False, True])
def test_the_same_at_every_call(bf16: bool) -> None:
    """Whatever program comes first: what is read too early would show as a difference."""
    made, x = layer(Kernel.fused, 2, 1.1, 64), tokens()
    first = results(made, x, bf16)
    for _ in range(30):
        again = results(made, x, bf16)
        for key, value in first.items():
            assert torch.equal(again[key], value), key


@pytest.mark.parametrize("number", [1, 17, 128, 20_011])
def test_few_and_many_tokens(number: int) -> None:
    x, made = tokens(number), [layer(each, 2, None) for each in (Kernel.loop, Kernel.fused)]
    expected, found = (results(each, x, False) for each in made)
    assert_alike(found, expected, False)


@pytest.mark.parametrize("kernel", [Kernel.grouped, Kernel.fused])
def test_the_host_does_not_wait(kernel: Kernel) -> None:
    """In a forward pass that leaves no token out."""
    made, x = layer(kernel, 2, None), tokens()
    if kernel is Kernel.grouped and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("there PyTorch's grouped GEMM is a loop")
    with torch.autocast("cuda", torch.bfloat16):
        made(x)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            made(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def exchanged(rank: int, world: int, bf16: bool) -> list[tuple[dict[str, Tensor], ...]]:
    """In tiles and through symmetric memory, for growing and shrinking batches."""
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    both = []
    for exchange in (Exchange.tiled, Exchange.symmetric):
        both.append(layer(Kernel.loop, 2, None))
        both[-1].exchange = exchange
        both[-1].divide(group)
    found = []
    for number in (100, 3001, 17, 3001, 3000):
        x = tokens(number) * (rank + 1)
        one, other = (results(made.train(), x, bf16) for made in both)
        found.append(({k: v.cpu() for k, v in one.items()}, {k: v.cpu() for k, v in other.items()}))
    dist.barrier(group)
    return found


@pytest.mark.skipif(not nvshmem_available(), reason="this PyTorch has no NVSHMEM here")
@pytest.mark.parametrize("world", [2])  # memory is not symmetric with oneself
@pytest.mark.parametrize("bf16", [False, True])
def test_symmetric_memory_equals_tiles(workers: Pool, world: int, bf16: bool) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"fewer than {world} GPUs")
    for batches in workers.run(exchanged, world, bf16):
        for tiles, symmetric in batches:
            assert_alike(symmetric, tiles, bf16)
