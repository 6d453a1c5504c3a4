"""AllReduce trains a model of which some parameters take no part, where it is told to."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

import co2
from co2.config import CommConfig
from co2.methods import METHODS
from tests.workers import Pool, WorkerError


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(3, 1) for _ in range(2))

    def forward(self, x: torch.Tensor, taken: int) -> torch.Tensor:
        return self.branches[taken](x).square().mean()


def train(rank: int, world: int, find: bool) -> torch.Tensor:
    net = Branches()
    optimizer = SGD(net.parameters(), lr=0.1)
    method = METHODS["allreduce"](comm=CommConfig(find_unused_parameters=find))
    model = method.prepare(net, optimizer, co2.Mesh.world())
    for step in range(4):
        model(torch.full((2, 3), float(rank + 1)), step % 2).backward()
        method.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def test_each_step_takes_another_branch(workers: Pool) -> None:
    first, second = workers.run(train, 2, True)
    assert torch.equal(first, second)
    net = Branches()
    optimizer = SGD(net.parameters(), lr=0.1)
    for step in range(4):
        losses = [net(torch.full((2, 3), float(rank + 1)), step % 2) for rank in range(2)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    alone = torch.cat([p.detach().flatten() for p in net.parameters()])
    torch.testing.assert_close(first, alone)


def test_else_pytorch_refuses(workers: Pool) -> None:
    with pytest.raises(WorkerError, match="find_unused_parameters"):
        workers.run(train, 2, False)
