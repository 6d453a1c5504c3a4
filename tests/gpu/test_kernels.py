"""Triton's kernels for compressed means on a GPU against PyTorch on the CPU."""

import pytest

from tests.gpu.conftest import CUDA
from tests.methods.driver import assert_same
from tests.methods.interpreted import results
from tests.methods.test_kernels import CASES


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("name", CASES)
def test_same_bits(name: str, device: str) -> None:
    assert_same(results(CASES[name], device), results(CASES[name]))
