"""Muon and AdamW as one optimizer, and which weights of each task are Muon's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from co2.config import DataConfig, OptimConfig, Optimizer, TrainConfig
from co2.errors import ConfigError
from tasks import TASKS
from tasks.shared.muon import MuonAdamW
from tasks.shared.optimizer import make_optimizer

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
    """Names of the weights of the task's smoke model that are Muon's, and all others' of two or
    more dimensions."""
    kind = TASKS[task_name]
    task = kind(kind.Config(**config), TrainConfig(), OPTIM, DataConfig())
    with torch.device("meta"):
        model = task.model()
        optimizer = task.optimizer(model)
    assert isinstance(optimizer, MuonAdamW)
    chosen = {id(w) for group in optimizer.param_groups if group["muon"] for w in group["params"]}
    weights = {name: w for name, w in model.named_parameters() if w.dim() > 1}
    muon = {name for name, weight in weights.items() if id(weight) in chosen}
    return muon, weights.keys() - muon


def test_gpt2() -> None:
    muon, adamw = names_of("gpt2")
    inside = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert muon == {f"transformer.h.{n}.{part}.weight" for n in range(4) for part in inside}
    assert adamw == {"transformer.wte.weight", "transformer.wpe.weight"}  # the head is tied to wte


def test_roberta() -> None:
    muon, adamw = names_of("roberta")
    assert len(muon) == 2 * 6 + 1 and "language.lm_head.dense.weight" in muon
    tables = ("word_embeddings", "position_embeddings", "token_type_embeddings")
    assert adamw == {f"language.roberta.embeddings.{table}.weight" for table in tables}


def test_transnormer() -> None:
    muon, adamw = names_of("transnormer")
    assert len(muon) == 4 * 4
    assert adamw == {"embedding.weight", "layers.0.tokens.theta"}


def test_vit() -> None:
    muon, adamw = names_of("vit")
    inside = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert muon == {f"blocks.{n}.{part}.weight" for n in range(3) for part in inside}
    assert adamw == {"cls_token", "pos_embed", "patch_embed.proj.weight", "head.weight"}


@pytest.mark.parametrize("objective", ["reconstruction", "classification"])
def test_shapenet(objective: str) -> None:
    from tasks.shapenet.shapenet import Objective

    muon, adamw = names_of("shapenet", objective=Objective(objective))
    places = {"encoder.position.0.weight", "encoder.embed.first.0.weight"}
    if objective == "reconstruction":
        assert adamw == places | {"position.0.weight", "head.weight"}
    else:
        assert adamw == places | {"head.8.weight"}
    assert "encoder.position.2.weight" in muon


def test_toy() -> None:
    assert names_of("toy") == ({"0.weight"}, {"3.weight"})


@pytest.mark.parametrize("name", ["resnet50", "ade20k"])
def test_convolutions_have_no_matrix(name: str) -> None:
    kind = TASKS[name]
    task = kind(kind.Config(), TrainConfig(), OPTIM, DataConfig())
    with pytest.raises(ConfigError, match=r"^optim\.name=muon: .* has no hidden matrix"):
        task.setup(2)


def test_a_model_of_ends_only() -> None:
    with pytest.raises(ConfigError, match=r"^optim\.name=muon: this model has no hidden matrix"):
        make_optimizer(nn.Linear(4, 2), OPTIM, ends={"weight"})
