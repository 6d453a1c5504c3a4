"""The small problem that methods and references are trained on, awkward on purpose.

Odd sizes, a 0-dimensional weight, tied weights, frozen parameters inside and outside the optimizer,
a trainable one that the optimizer does not know, BatchNorm, an integer buffer, and two parameter
groups of which only one follows the schedule.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

TAU = 3
FACTORS = (0.3, 0.6, 0.9, 0.9, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Of the first group's learning rate, by step: five rounds of warm-up and decay."""


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda groups: SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain": lambda groups: SGD(groups, lr=0.1),
    "momentum": lambda groups: SGD(groups, lr=0.1, momentum=0.9, dampening=0.2),
    "decay": lambda groups: SGD(groups, lr=0.1, weight_decay=0.1),
    "adam": lambda groups: Adam(groups, lr=0.02, weight_decay=0.1),
    "adamw": lambda groups: AdamW(groups, lr=0.02, weight_decay=0.1),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # First, because it is trained: whoever leaves out the first tensor is seen.
        self.scale = nn.Parameter(torch.tensor(0.9) + 0.1 * torch.randn(()))
        self.enter = nn.Linear(5, 7, bias=False)  # a bias before BatchNorm has no gradient
        self.norm = nn.BatchNorm1d(7)
        self.middle = nn.Linear(7, 7)
        self.again = nn.Linear(7, 7)
        self.again.weight = self.middle.weight
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.unknown = nn.Parameter(torch.randn(3))
        self.leave = nn.Linear(7, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("drift", torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
            self.drift.mul_(0.5).add_(x.detach().mean())
        hidden = torch.tanh(self.norm(self.enter(x)))
        hidden = torch.tanh(self.again(torch.tanh(self.middle(hidden)) + self.frozen(hidden)))
        return self.scale * self.leave(hidden) + self.unknown


def build(seed: int, optimizer: str, dtype: torch.dtype = torch.float64) -> tuple[Net, Optimizer]:
    """A model whose every parameter and float buffer depends on `seed`, and its optimizer."""
    torch.manual_seed(seed)
    net = Net().to(dtype)
    with torch.no_grad():
        net.norm.running_mean.normal_()
    groups = [
        {"params": [net.enter.weight, *net.norm.parameters(), net.scale]},
        {"params": [net.middle.weight, net.middle.bias, net.frozen.weight, net.again.bias]},
        {"params": list(net.leave.parameters())},
    ]
    return net, OPTIMIZERS[optimizer](groups)


def rates(optimizer: Optimizer, step: int) -> tuple[float, ...]:
    """Learning rates of the groups: the schedule on the first two, unlike each other; the third's
    is constant. After the last step they stay."""
    peak = 0.1 if isinstance(optimizer, SGD) else 0.02
    factor = FACTORS[min(step, len(FACTORS) - 1)]
    return peak * factor, 0.5 * peak * factor, 0.3 * peak


def set_lr(optimizer: Optimizer, step: int) -> None:
    for group, rate in zip(optimizer.param_groups, rates(optimizer, step), strict=True):
        group["lr"] = rate


def backward(model: nn.Module, step: int, rank: int) -> None:
    """Gradients of one step on data that no other step or replica sees."""
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(6 + rank, 5, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randn(6 + rank, 3, generator=generator, dtype=torch.float64).to(dtype)
    (model(x) - y).square().mean().backward()


def build_drift(sizes: Sequence[int]) -> tuple[nn.Module, Optimizer]:
    """Weights of the given sizes, each its own parameter, for `backward_drift`."""
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(n, generator=generator, dtype=torch.float64) for n in sizes]
    model = nn.ParameterList([nn.Parameter(weight) for weight in weights])
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)


def backward_drift(model: nn.Module, step: int, rank: int) -> None:
    """Random gradients that do not depend on the weights."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)


def snapshot(net: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, copied."""
    return {name: value.detach().clone() for name, value in net.state_dict().items()}
