"""The moving average of the weights, against PyTorch's AveragedModel."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import co2
from co2.config import TrainConfig
from co2.errors import ConfigError
from co2.train.moving_average import MovingAverage
from tests.workers import Pool

DECAY, STEPS = 0.9, 7


def tensors(module: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for t in module.state_dict().values()]


def trained(rank: int, world: int) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """What AveragedModel holds, what is shown, and the weights before and after that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    method = co2.methods.METHODS["local_sgd"](co2.methods.METHODS["local_sgd"].Config(tau=3))
    wrapped = method.prepare(model, optimizer, co2.Mesh.world())
    average = MovingAverage(model, DECAY)
    move = get_ema_multi_avg_fn(DECAY)
    other = AveragedModel(copy.deepcopy(model), multi_avg_fn=move, use_buffers=True)
    other.n_averaged += 1  # it holds the start, and does not copy the first step's weights
    torch.manual_seed(rank)
    for _ in range(STEPS):
        wrapped(torch.randn(8, 5)).square().sum().backward()
        method.step()
        optimizer.zero_grad()
        average.update()
        other.update_parameters(model)
    before = tensors(model)
    with average.shown(method):
        inside = tensors(model)
    return tensors(other.module), inside, before, tensors(model)


@pytest.mark.parametrize("world", [1, 2])
def test_it_shows_the_mean_of_the_replicas_averages(workers: Pool, world: int) -> None:
    held = workers.run(trained, world)
    for _, inside, before, after in held:
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        for number, shown in enumerate(inside):
            if shown.is_floating_point():
                mean = torch.stack([found[0][number] for found in held]).mean(0)
                assert torch.allclose(shown, mean, atol=1e-6)
                frozen = number == 1
                assert torch.equal(shown, before[number]) == frozen


def test_without_a_decay_it_holds_nothing() -> None:
    average = MovingAverage(nn.Linear(2, 2), None)
    average.update()
    average.load_state_dict([])
    assert average.tensors == [] and average.nbytes == 0


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, float("nan")])
def test_refused(decay: float) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(ema_decay=decay)
    assert caught.value.key == "ema_decay"
