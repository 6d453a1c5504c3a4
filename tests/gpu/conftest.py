"""Fixtures of the tests on a GPU, and where their bodies also run without one."""

import pytest
import torch

from tests.cli.conftest import nobody_started_us, text

__all__ = ["CUDA", "nobody_started_us", "text"]

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ],
)
