"""What a run does with a task's model: the moving average of its weights (against PyTorch's
AveragedModel), activations that are computed again, and the layout of its convolutions."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import co2
from co2.train.build import tune_convolutions
from co2.train.moving_average import MovingAverage
from co2.train.within_replica import checkpoint_activations
from tests.cli.harness import configured
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


def after_a_step(recompute: bool, compiled: bool) -> list[Tensor]:
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
    plain, again = (after_a_step(recompute, compiled) for recompute in (False, True))
    for one, other in zip(plain, again, strict=True):
        torch.testing.assert_close(other, one)


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
