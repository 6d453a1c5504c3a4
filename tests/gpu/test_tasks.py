"""Tasks on a GPU: their kernels against what computes the same without them, and a host that does
not wait. The arithmetic of the fused experts is also tested without a GPU, in tests/tasks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.replicas_on_one_gpu import SMOKE, Clock, measure
from co2.comm.mesh import Mesh
from co2.config import DataConfig, OptimConfig, TrainConfig
from tasks.graph.graph import Graph
from tasks.graph.networks import Network
from tasks.graph.stores import StoreName
from tasks.moe.experts import Exchange, Experts, Kernel
from tasks.moe.moe import nvshmem_available
from tasks.text import transnormer_model as parts
from tests.gpu import CUDA, gpu_only, no_waits
from tests.tasks import build, random_graph
from tests.tasks.build import gpt2
from tests.workers import Pool

# Attention.


@gpu_only
@pytest.mark.timeout(60)  # on an H200 they had not ended after 110 s
@pytest.mark.parametrize("length", [64, 100, 1024])
@pytest.mark.parametrize("place", [0.0, 1.0])
def test_kernels_of_linear_attention(length: int, place: float) -> None:
    """Outputs and gradients, with LRPE's double width of queries and keys, in bf16."""
    pytest.importorskip("fla.ops.simple_gla")
    rates = parts.decay_rates(4, place, torch.zeros(1, device="cuda"))
    random = torch.Generator("cuda").manual_seed(0)
    q, k, v, weights = (
        torch.randn(2, 4, length, width, generator=random, device="cuda", dtype=torch.bfloat16)
        for width in (256, 256, 128, 128)
    )
    q, k = q / 16, k / 16
    found = []
    for form in (parts.kernels, parts.parallel):
        wide = [part.detach().float().requires_grad_() for part in (q, k, v)]
        inputs = [part.bfloat16() for part in wide] if form is parts.kernels else wide
        out = form(*inputs, rates)
        (out.float() * weights.float()).sum().backward()
        found.append([out.float(), *(part.grad for part in wide)])
    for one, other in zip(*found, strict=True):
        assert ((one - other).norm() / other.norm()).item() < 0.02


@gpu_only
@pytest.mark.parametrize("compiled", [False, True])
def test_flash_attention_runs(compiled: bool) -> None:
    """It refuses masks."""
    task = gpt2(Path("unused"), context=128, vocab_size=300)
    model = task.model().cuda()
    if compiled:
        model.compile(backend="aot_eager")
    tokens = torch.randint(300, (2, 128), device="cuda")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.autocast("cuda", dtype=torch.bfloat16):
        task.logits(model, tokens).float().logsumexp(-1).sum().backward()
    assert model.transformer.wte.weight.grad.isfinite().all()


# Experts.

WIDTH, HIDDEN, TOKENS = 200, 328, 3001
"""No multiples of a tile's; rows of 16 bytes, as grouped GEMMs need them."""


def layer(kernel: Kernel, active: int, capacity: float | None, experts: int = 8) -> Experts:
    assert torch.get_float32_matmul_precision() == "highest"
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


def found_by(made: Experts, x: Tensor, bf16: bool) -> dict[str, Tensor]:
    """Output, losses and all gradients."""
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


@gpu_only
@pytest.mark.parametrize("kernel", [Kernel.grouped, Kernel.fused])
@pytest.mark.parametrize(
    ("active", "capacity", "experts", "number"),
    [
        *((1, None, 8, TOKENS), (2, 0.7, 8, TOKENS), (2, None, 64, TOKENS), (1, 0.7, 64, TOKENS)),
        *((2, None, 8, number) for number in (1, 17, 128, 20_011)),
    ],
)
@pytest.mark.parametrize("bf16", [False, True])
def test_experts_equal_the_loop(
    kernel: Kernel, active: int, capacity: float | None, bf16: bool, experts: int, number: int
) -> None:
    """And the routing, but for tokens whose experts are equal within rounding, of which there are
    none here."""
    loop, made = (layer(each, active, capacity, experts) for each in (Kernel.loop, kernel))
    expected, found = (found_by(each, tokens(number), bf16) for each in (loop, made))
    for key in ("choice", "counts", "wanted"):
        assert torch.equal(getattr(loop.routing, key), getattr(made.routing, key)), key
    assert_alike(found, expected, bf16)


@gpu_only
@pytest.mark.parametrize("kernel", [Kernel.grouped, Kernel.fused])
@pytest.mark.parametrize("bf16", [False, True])
def test_empty_and_overfull_experts(kernel: Kernel, bf16: bool) -> None:
    found = []
    for each in (Kernel.loop, kernel):
        made = layer(each, 1, 3.0)
        nn.init.zeros_(made.gate.weight)
        nn.init.ones_(made.gate.weight[3])
        found.append(found_by(made, tokens().abs(), bf16))
        assert made.routing.wanted[0, 3] == TOKENS and made.routing.counts.sum() < TOKENS
    assert_alike(found[1], found[0], bf16)
    assert not found[1]["d inner"][:3].any()


@gpu_only
@pytest.mark.parametrize("bf16", [False, True])
def test_fused_experts_are_the_same_at_every_call(bf16: bool) -> None:
    """Whatever program comes first: what is read too early would show as a difference."""
    made, x = layer(Kernel.fused, 2, 1.1, 64), tokens()
    first = found_by(made, x, bf16)
    for _ in range(30):
        again = found_by(made, x, bf16)
        for key, value in first.items():
            assert torch.equal(again[key], value), key


@gpu_only
@pytest.mark.parametrize("kernel", [Kernel.grouped, Kernel.fused])
def test_the_host_does_not_wait_for_experts(kernel: Kernel) -> None:
    """In a forward pass that leaves no token out."""
    made, x = layer(kernel, 2, None), tokens()
    if kernel is Kernel.grouped and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("there PyTorch's grouped GEMM is a loop")
    with torch.autocast("cuda", torch.bfloat16):
        made(x)  # compiles
        with no_waits():
            made(x)


def exchanged(rank: int, world: int, bf16: bool) -> None:
    """In tiles and through symmetric memory, for growing and shrinking batches."""
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    both = []
    for exchange in (Exchange.tiled, Exchange.symmetric):
        both.append(layer(Kernel.loop, 2, None))
        both[-1].exchange = exchange
        both[-1].divide(group)
    for number in (100, 3001, 17, 3001, 3000):
        x = tokens(number) * (rank + 1)
        tiles, symmetric = (found_by(made.train(), x, bf16) for made in both)
        assert_alike(symmetric, tiles, bf16)
    dist.barrier(group)


@gpu_only
@pytest.mark.skipif(not nvshmem_available(), reason="this PyTorch has no NVSHMEM here")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="memory is not symmetric with oneself")
@pytest.mark.parametrize("bf16", [False, True])
def test_symmetric_memory_equals_tiles(workers: Pool, bf16: bool) -> None:
    workers.run(exchanged, 2, bf16)


# Graphs, whose batches arrive while the GPU computes.


def graph(tmp_path: Path, **config: Any) -> Graph:
    path = tmp_path / "graph"
    random_graph.write(path)
    data = DataConfig(root=str(tmp_path), path=str(path))
    own = Graph.Config(fanout=[3, 4], hidden=8, dropout=0.0, store=StoreName.diskgnn, **config)
    made = Graph(own, TrainConfig(batch_size=10, steps=8), OptimConfig(lr=1e-2), data)
    made.setup(1)
    return made


def drawn(made: Graph, device: str, number: int) -> list[dict[str, Tensor]]:
    return build.drawn(made, number, own=Mesh(0, 1, torch.device(device)))


@gpu_only
@pytest.mark.parametrize("kind", Network)
@pytest.mark.parametrize(("device_mb", "depth"), [(0.0, 0), (1 / 1024, 2)])
def test_graphs_learn_as_on_a_cpu(
    tmp_path: Path, kind: Network, device_mb: float, depth: int
) -> None:
    """Losses and gradients, with a part of the features on the GPU from the beginning; and steps
    that do not wait."""
    made, found = graph(tmp_path, device_mb=device_mb, ahead=depth, model=kind), []
    for device in ("cpu", "cuda"):
        model = made.model().to(device)
        for batch in drawn(made, device, 3):
            assert {part.device.type for part in batch.values()} == {device}
            loss = made.loss(model, batch)
            loss.backward()
        assert ("table" in batch) == (device_mb > 0)
        found.append([loss.detach().cpu(), *(weight.grad.cpu() for weight in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    batches = drawn(made, "cuda", 3)
    with no_waits():
        for batch in batches:
            made.loss(model, batch).backward()


@pytest.mark.parametrize("device", [CUDA])
def test_batched_replicas_learn_alike(device: str) -> None:
    """As a graph of kernels in bf16, against fp32 on the CPU."""
    settings = replace(SMOKE, width=32, vocab=64, rounds=(3, 6, 10))
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(8, (4000,), generator=generator)  # 8 of 64 tokens, which is soon learned
    validation = torch.randint(8, (64, settings.context + 1), generator=generator)
    start = settings.model().start(0)
    here, there = (
        measure(settings, *(t.to(place) for t in (text, validation, start)), Clock(9.0, 10**9))
        for place in ("cpu", device)
    )
    assert there == pytest.approx(here, rel=0.02)
    assert max(there.values()) < 3.5
