"""Weights of convolutions are channels last on a GPU alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from co2.train.build import tune_convolutions
from tests.cli.harness import configured

CUDA, CPU = torch.device("cuda"), torch.device("cpu")  # only their names are looked at


@pytest.fixture(autouse=True)
def benchmark() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = before


@pytest.mark.parametrize(
    ("device", "words", "moved"),
    [
        (CUDA, (), True),
        (CUDA, ("mesh.replica_size=2", "mesh.strategy=zero1"), True),
        (CUDA, ("mesh.replica_size=2", "mesh.strategy=zero3"), False),
        (CUDA, ("train.compile=true",), True),
        (CUDA, ("train.compile=true", "train.checkpoint_activations=true"), False),
        (CPU, (), False),
    ],
)
def test_layout(tmp_path: Path, device: torch.device, words: tuple[str, ...], moved: bool) -> None:
    torch.backends.cudnn.benchmark = False
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3), nn.Flatten())
    image = torch.randn(2, 3, 8, 8)
    before, weights = net(image), list(net.parameters())
    tune_convolutions(net, device, configured("task=resnet50", *words, runs=tmp_path))
    assert all(a is b for a, b in zip(weights, net.parameters(), strict=True))
    assert net[2].weight.is_contiguous(memory_format=torch.channels_last) == moved
    assert torch.backends.cudnn.benchmark == (device is CUDA)
    assert torch.allclose(net(image), before, atol=1e-5)
