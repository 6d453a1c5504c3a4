"""Tests on a GPU. Those with a parameter `device` run on a CPU, too: their bodies at least work."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

_MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = pytest.param("cuda", marks=_MARKS)
DEVICES = ["cpu", CUDA]
SLOWLY = [pytest.param("cpu", marks=pytest.mark.slow), CUDA]


def gpu_only(test: Any) -> Any:
    for mark in _MARKS:
        test = mark(test)
    return test


@contextmanager
def no_waits() -> Iterator[None]:
    """Inside, the host may not wait for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
