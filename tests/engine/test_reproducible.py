"""Norms and checksums have the same bits under any number of threads, at any address."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from co2.comm.reproducible import checksum, squared_norm

SIZES = (0, 1, 5, 4095, 4096, 4097, 12_288, 100_003, 1 << 20, (1 << 20) + 17, 3_000_001)
THREADS = (1, 2, 4)
DTYPES = (torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def drawn(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=dtype)


def moved(x: Tensor, by: int) -> Tensor:
    """A copy that begins at another place of its memory."""
    return torch.empty(len(x) + by, dtype=x.dtype)[by:].copy_(x)


def of_all_threads(figure: Callable[[Tensor], Tensor], x: Tensor) -> set[float]:
    """What a figure of x is on each number of threads, at several places of the memory."""
    found = set()
    for threads in THREADS:
        torch.set_num_threads(threads)
        found |= {figure(moved(x, by)).item() for by in (0, 1, 7)}
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_any_threads_and_place_give_the_same_bits(size: int, dtype: torch.dtype) -> None:
    x = drawn(size, dtype)
    assert len(of_all_threads(checksum, x)) == 1
    (found,) = of_all_threads(squared_norm, x)
    exact = x.double().square().sum().item()
    assert found == pytest.approx(exact, rel=1e-6 if dtype is torch.float32 else 1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_sees_every_bit(dtype: torch.dtype) -> None:
    x = drawn(100, dtype)
    found = {checksum(x).item()}
    for at in (0, 1, 57, 99):
        bits = torch.int32 if dtype is torch.float32 else torch.int64
        for bit in range(8 * x.itemsize):
            other = x.clone()
            other.view(bits)[at] ^= 1 << bit if bit < 8 * x.itemsize - 1 else torch.iinfo(bits).min
            found.add(checksum(other).item())
    assert len(found) == 1 + 4 * 8 * x.itemsize


def test_changes_do_not_cancel() -> None:
    """Neither within a piece nor between two."""
    x = drawn((1 << 20) + 5, torch.float32)
    found = {checksum(x).item()}
    for up, down in ((0, 1), (3, (1 << 20) + 3), (7, (1 << 20) + 1)):
        rounded, swapped = x.clone(), x.clone()
        rounded.view(torch.int32)[up] += 1
        rounded.view(torch.int32)[down] -= 1
        swapped[up], swapped[down] = x[down], x[up]
        found |= {checksum(rounded).item(), checksum(swapped).item()}
    assert len(found) == 7
