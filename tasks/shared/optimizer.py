"""The inner optimizers that all tasks share: AdamW, SGD and Muon."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from co2.config import OptimConfig, Optimizer
from co2.errors import require
from tasks.shared.muon import MuonAdamW

NO_MATRIX = "this model has no hidden matrix, which Muon is for; use adamw or sgd"


def make_optimizer(
    model: nn.Module,
    optim: OptimConfig,
    spared: Collection[str] = (),
    ends: Collection[str] = (),
) -> torch.optim.Optimizer:
    """Return AdamW, SGD or Muon over the trainable weights of `model`.

    It has two groups, in this order: weights of two or more dimensions, with weight decay; and all
    others, without: no weight decay on norms and biases.
    Weights named in `spared` (positions, class tokens) have no weight decay either. Both groups
    exist even if one is empty, so that all checkpoints have the same form. Each keeps the peak
    learning rate as "initial_lr", from which a schedule computes "lr".

    Muon has a third group, before them: the hidden matrices. AdamW updates the rest. A matrix is
    hidden if it is no embedding (a weight of `nn.Embedding`, tied to the output or not), not
    spared, and not named in `ends`: the weights that make the outputs, or that embed the inputs.

    Raises:
        ConfigError: `optim` asks for Muon, and no matrix of the model is hidden.
    """
    trainable = {name: w for name, w in model.named_parameters() if w.requires_grad}
    assert trainable, "the model has no trainable weight"
    for named in (spared, ends):
        assert set(named) <= trainable.keys(), f"not in the model: {set(named) - trainable.keys()}"
    decayed = {name for name, w in trainable.items() if w.dim() >= 2 and name not in spared}
    hidden: set[str] = set()
    if optim.name is Optimizer.muon:
        matrices = {name for name in decayed if trainable[name].dim() == 2}
        hidden = matrices - _embeddings(model) - set(ends)
        require(bool(hidden), "optim.name", "muon", NO_MATRIX)

    def group(names: Collection[str], weight_decay: float) -> dict[str, Any]:
        weights = [weight for name, weight in trainable.items() if name in names]
        return {"params": weights, "weight_decay": weight_decay, "initial_lr": optim.lr}

    groups = [
        group(decayed - hidden, optim.weight_decay),
        group(trainable.keys() - decayed, 0.0),
    ]
    # On GPUs one kernel updates all weights. None leaves the choice to PyTorch.
    fused = all(weight.is_cuda for weight in trainable.values()) or None
    if optim.name is Optimizer.sgd:
        if any(hasattr(weight, "to_local") for weight in trainable.values()):
            fused = None  # PyTorch has no fused SGD of DTensors (zero2, zero3)
        return torch.optim.SGD(
            groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov, fused=fused
        )
    first, second = optim.betas
    if optim.name is Optimizer.adamw:
        return torch.optim.AdamW(
            groups, lr=optim.lr, betas=(first, second), eps=optim.eps, fused=fused
        )
    # An update of Muon is made as large as one of AdamW: 0.2 root mean square times the rate (Liu
    # et al., "Muon is Scalable for LLM Training", arXiv 2502.16982). So one rate serves both, and
    # it does not matter whether a model keeps a matrix transposed, as GPT-2 does.
    muon = {"muon": True, "lr": optim.lr, "adjust_lr_fn": "match_rms_adamw"}
    adamw = {"muon": False, "lr": optim.lr, "betas": (first, second), "eps": optim.eps}
    return MuonAdamW(
        [
            group(hidden, optim.weight_decay) | muon,
            *(others | adamw | {"fused": fused} for others in groups),
        ]
    )


def _embeddings(model: nn.Module) -> set[str]:
    """Names of the weights of embeddings. A tied weight has the name of its first place."""
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    return {name for name, weight in model.named_parameters() if id(weight) in tables}
