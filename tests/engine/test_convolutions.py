"""Weights of convolutions are channels last on a GPU alone."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from co2.config import Strategy
from co2.train.session import tune_convolutions

CUDA, CPU = torch.device("cuda"), torch.device("cpu")  # only their names are looked at


@pytest.fixture(autouse=True)
def benchmark() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = before


@pytest.mark.parametrize(
    ("device", "strategy", "moved"),
    [
        (CUDA, Strategy.ddp, True),
        (CUDA, Strategy.zero1, True),
        (CUDA, Strategy.zero3, False),
        (CPU, Strategy.ddp, False),
    ],
)
def test_layout(device: torch.device, strategy: Strategy, moved: bool) -> None:
    torch.backends.cudnn.benchmark = False
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3), nn.Flatten())
    image = torch.randn(2, 3, 8, 8)
    before, weights = net(image), list(net.parameters())
    tune_convolutions(net, device, strategy)
    assert all(a is b for a, b in zip(weights, net.parameters(), strict=True))
    assert net[2].weight.is_contiguous(memory_format=torch.channels_last) == moved
    assert torch.backends.cudnn.benchmark == (device is CUDA)
    assert torch.allclose(net(image), before, atol=1e-5)
