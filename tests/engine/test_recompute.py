"""train.checkpoint_activations: the same training, compiled or not."""

import pytest
import torch
from torch import Tensor, nn

from co2.train.within_replica import checkpoint_activations


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.4)

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return x + scale * torch.relu(self.drop(self.norm(self.inner(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


def trained(recompute: bool, compiled: bool) -> list[Tensor]:
    """Gradients and buffers after a step."""
    torch.manual_seed(0)
    net = Net()
    if recompute:
        checkpoint_activations(net)
    if compiled:
        net.compile(backend="aot_eager")  # needs no C++ compiler
    net(torch.randn(5, 6)).square().sum().backward()
    return [*(param.grad for param in net.parameters()), *net.buffers()]


@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_changes(compiled: bool) -> None:
    """Dropout's masks come again, and batch norm counts a batch once."""
    plain, again = trained(False, compiled), trained(True, compiled)
    for one, other in zip(plain, again, strict=True):
        torch.testing.assert_close(other, one)
