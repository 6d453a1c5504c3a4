"""The batched replicas as a graph of kernels in bf16, against fp32 on the CPU."""

from dataclasses import replace

import pytest
import torch

from benchmarks.replicas_on_one_gpu import SMOKE, Clock, measure
from tests.gpu.conftest import CUDA


@pytest.mark.parametrize("device", [CUDA])
def test_learns_alike(device: str) -> None:
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
