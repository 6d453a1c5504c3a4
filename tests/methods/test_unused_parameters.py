"""AllReduce trains a model of which some parameters take no part, where it is told to."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

import co2
from co2.config import CommConfig
from co2.errors import ConfigError
from co2.methods import METHODS
from tests.workers import Pool


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(3, 1) for _ in range(2))

    def forward(self, x: torch.Tensor, taken: int) -> torch.Tensor:
        return self.branches[taken](x).square().mean()


def train(rank: int, world: int, find: bool, first: int = 0) -> torch.Tensor:
    net = Branches()
    optimizer = SGD(net.parameters(), lr=0.1)
    method = METHODS["allreduce"](comm=CommConfig(find_unused_parameters=find))
    model = method.prepare(net, optimizer, co2.Mesh.world())
    for step in range(first, first + 4):
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


REFUSED = (
    r"comm\.find_unused_parameters=False: the loss did not depend on branches\.{}\.weight, so DDP "
    r"has not averaged .*CommConfig\(find_unused_parameters=True\)"
)


def refused(rank: int, world: int, first: int) -> bool:
    """At the first step, before the optimizer moves a weight."""
    with pytest.raises(ConfigError, match=REFUSED.format(1 - first)):
        train(rank, world, False, first)
    return True


@pytest.mark.parametrize("first", [0, 1])
def test_else_it_is_refused(workers: Pool, first: int) -> None:
    assert all(workers.run(refused, 2, first))


def refused_in_a_sum(rank: int, world: int) -> bool:
    """At the second micro-batch of the first step."""
    net = Branches()
    method = METHODS["allreduce"]()
    model = method.prepare(net, SGD(net.parameters(), lr=0.1), co2.Mesh.world())
    model(torch.ones(2, 3), 0).backward()
    with pytest.raises(ConfigError, match=REFUSED.format(1)):
        model(torch.ones(2, 3), 0)
    return True


def test_where_gradients_are_added_up(workers: Pool) -> None:
    assert all(workers.run(refused_in_a_sum, 2))
