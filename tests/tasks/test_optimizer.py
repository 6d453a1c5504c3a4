"""Which weights decay, what a schedule finds, and Muon beside AdamW."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from co2.config import DataConfig, OptimConfig, Optimizer, TrainConfig
from co2.errors import ConfigError
from tasks import TASKS
from tasks.shapenet.shapenet import Objective
from tasks.shared.muon import MuonAdamW
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


OPTIM = OptimConfig(name=Optimizer.muon, lr=0.02, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6)
STEPS = range(6)


class Words(nn.Module):
    """An embedding tied to the output, two hidden matrices, a kernel and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 9, bias=False)
        self.table = nn.Embedding(9, 6)
        self.table.weight = self.out.weight
        self.kernel = nn.Conv2d(6, 6, 1)
        self.wide, self.narrow = nn.Linear(6, 10), nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.kernel(self.table(words)[:, :, None, None]).flatten(1)
        return self.out(self.norm(hidden + self.narrow(self.wide(hidden).tanh())))


def built() -> Words:
    torch.manual_seed(0)
    return Words()


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: range = STEPS) -> None:
    """Some steps, of a falling rate, with gradients that depend on the step alone."""
    for step in steps:
        torch.manual_seed(step)
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = OPTIM.lr * (1 - step / 10)
            optimizer.step()


def test_equals_the_two_stepped_by_hand() -> None:
    ours, theirs = built(), built()
    train(ours, make_optimizer(ours, OPTIM))
    matrices = [theirs.wide.weight, theirs.narrow.weight]
    muon = torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    chosen = {id(weight) for weight in matrices}
    rest = [weight for weight in theirs.parameters() if id(weight) not in chosen]
    groups: list[dict[str, Any]] = [
        {"params": [w for w in rest if w.dim() > 1], "weight_decay": 0.1},
        {"params": [w for w in rest if w.dim() == 1], "weight_decay": 0.0},
    ]
    train(theirs, muon, torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-6))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_update_is_as_large_as_one_of_adamw() -> None:
    """0.2 root mean square for each unit of the rate, however long the sides; so one rate does."""
    weight = nn.Parameter(torch.zeros(40, 200))
    optim = OptimConfig(name=Optimizer.muon, lr=1.0)
    optimizer = make_optimizer(nn.ParameterList([weight]), optim)
    torch.manual_seed(0)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert weight.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2)


def test_it_looks_like_one_optimizer() -> None:
    model = built()
    optimizer = make_optimizer(model, OPTIM)
    assert isinstance(optimizer, MuonAdamW) and isinstance(optimizer, torch.optim.Optimizer)
    hidden, decayed, spared = optimizer.param_groups
    assert [id(weight) for weight in hidden["params"]] == [
        id(model.wide.weight),
        id(model.narrow.weight),
    ]
    assert [id(weight) for weight in decayed["params"]] == [
        id(model.out.weight),
        id(model.kernel.weight),
    ]
    assert all(weight.dim() == 1 for weight in spared["params"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]
    assert all(group["lr"] == group["initial_lr"] == 0.02 for group in optimizer.param_groups)
    assert (hidden["momentum"], hidden["nesterov"]) == (0.95, True)
    train(model, optimizer)
    assert optimizer.state.keys() == set(model.parameters())
    assert optimizer.state[model.wide.weight].keys() == {"momentum_buffer"}
    optimizer.zero_grad()
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("stop", STEPS[1:])
def test_goes_on_from_its_state(stop: int) -> None:
    whole, model = built(), built()
    train(whole, make_optimizer(whole, OPTIM))
    first, second = make_optimizer(model, OPTIM), make_optimizer(model, OPTIM)
    train(model, first, steps=STEPS[:stop])
    second.load_state_dict(first.state_dict())
    train(model, second, steps=STEPS[stop:])
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


def names_of(task_name: str, **config: Any) -> tuple[set[str], set[str]]:
    """Names of the weights of two or more dimensions in the task's smoke model: those of Muon, and
    all others."""
    kind = TASKS[task_name]
    task = kind(kind.Config(**config), TrainConfig(), OPTIM, DataConfig())
    with torch.device("meta"):
        model = task.model()
        optimizer = task.optimizer(model)
    chosen = {id(w) for group in optimizer.param_groups if group["muon"] for w in group["params"]}
    weights = {name: w for name, w in model.named_parameters() if w.dim() > 1}
    muon = {name for name, weight in weights.items() if id(weight) in chosen}
    return muon, weights.keys() - muon


TABLES = ("word_embeddings", "position_embeddings", "token_type_embeddings")
PLACES = {"encoder.position.0.weight", "encoder.embed.first.0.weight"}
"""Of shapenet: what reads coordinates."""


@pytest.mark.parametrize(
    ("task", "config", "adamw"),
    [
        ("gpt2", {}, {"transformer.wte.weight", "transformer.wpe.weight"}),  # wte is the head, too
        ("roberta", {}, {f"language.roberta.embeddings.{table}.weight" for table in TABLES}),
        ("transnormer", {}, {"embedding.weight", "layers.0.tokens.theta"}),
        ("vit", {}, {"cls_token", "pos_embed", "patch_embed.proj.weight", "head.weight"}),
        ("shapenet", {}, PLACES | {"position.0.weight", "head.weight"}),
        ("shapenet", {"objective": Objective.classification}, PLACES | {"head.8.weight"}),
        ("toy", {}, {"3.weight"}),
    ],
)
def test_the_ends_of_a_model_are_adamw_s(
    task: str, config: dict[str, Any], adamw: set[str]
) -> None:
    muon, found = names_of(task, **config)
    assert found == adamw and muon


@pytest.mark.parametrize("name", ["resnet50", "ade20k"])
def test_convolutions_have_no_matrix(name: str) -> None:
    kind = TASKS[name]
    task = kind(kind.Config(), TrainConfig(), OPTIM, DataConfig())
    with pytest.raises(ConfigError, match=r"^optim\.name=muon: .* has no hidden matrix"):
        task.setup(2)


def test_a_model_of_ends_only() -> None:
    with pytest.raises(ConfigError, match=r"^optim\.name=muon: this model has no hidden matrix"):
        make_optimizer(nn.Linear(4, 2), OPTIM, ends={"weight"})
