"""On a GPU: FlashAttention runs, and flash-linear-attention's kernels compute what we do."""

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tasks.text import transnormer_model as parts
from tests.tasks.build import gpt2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.timeout(60)  # on an H200 they had not ended after 110 s
@pytest.mark.parametrize("length", [64, 100, 1024])
@pytest.mark.parametrize("place", [0.0, 1.0])
def test_kernels(length: int, place: float) -> None:
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
