"""Which weights decay, and what a schedule finds."""

import pytest
import torch
from torch import nn

from co2.config import OptimConfig, Optimizer
from tasks.shared.optimizer import make_optimizer


def model() -> nn.Module:
    layers = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.Linear(4, 5))
    layers[2].weight.requires_grad_(False)
    return layers


def test_matrices_decay_and_frozen_weights_stay_out() -> None:
    layers = model()
    optimizer = make_optimizer(layers, OptimConfig(lr=0.5, weight_decay=0.1, betas=(0.8, 0.9)))
    decayed, spared = optimizer.param_groups
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [weight is layers[0].weight for weight in decayed["params"]] == [True]
    names = {
        name for name, weight in layers.named_parameters() for w in spared["params"] if weight is w
    }
    assert names == {"0.bias", "1.weight", "1.bias", "2.bias"}
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    for group in optimizer.param_groups:
        assert group["lr"] == group["initial_lr"] == 0.5
        assert group["betas"] == (0.8, 0.9)


def test_sgd() -> None:
    optim = OptimConfig(name=Optimizer.sgd, lr=0.1, momentum=0.7, nesterov=True, weight_decay=0.2)
    optimizer = make_optimizer(model(), optim)
    assert isinstance(optimizer, torch.optim.SGD)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    for group in optimizer.param_groups:
        assert (group["momentum"], group["nesterov"], group["initial_lr"]) == (0.7, True, 0.1)


def test_both_groups_exist_even_if_one_is_empty() -> None:
    optimizer = make_optimizer(nn.Linear(2, 2, bias=False), OptimConfig())
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0]


def test_what_is_named_is_spared() -> None:
    layers = model()
    decayed, spared = make_optimizer(layers, OptimConfig(), spared=["0.weight"]).param_groups
    assert not decayed["params"] and any(w is layers[0].weight for w in spared["params"])


@pytest.mark.parametrize("name", Optimizer)
def test_one_kernel_updates_all_weights_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, name: Optimizer
) -> None:
    layers = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    on_cpu = make_optimizer(layers, OptimConfig(name=name))
    assert all(group.get("fused") is None for group in on_cpu.param_groups)
    monkeypatch.setattr(nn.Parameter, "is_cuda", True)
    on_gpu = make_optimizer(layers, OptimConfig(name=name))
    assert all(group.get("fused") for group in on_gpu.param_groups if not group.get("muon"))
