"""The inner optimizers that all tasks share: AdamW and SGD."""

from collections.abc import Collection

import torch
from torch import nn

from co2.config import OptimConfig, Optimizer


def make_optimizer(
    model: nn.Module, optim: OptimConfig, spared: Collection[str] = ()
) -> torch.optim.Optimizer:
    """Return AdamW or SGD over the trainable weights of `model`.

    It has two groups, in this order: weights of two or more dimensions, with weight decay; and all
    others (biases, norms) without, because to shrink a scale or a shift regularizes nothing.
    Weights named in `spared` (positions, class tokens) have no weight decay either. Both groups
    exist even if one is empty, so that all checkpoints have the same form. Each keeps the peak
    learning rate as "initial_lr", from which a schedule computes "lr".
    """
    trainable = {name: w for name, w in model.named_parameters() if w.requires_grad}
    assert trainable, "the model has no trainable weight"
    assert set(spared) <= trainable.keys(), f"not in the model: {set(spared) - trainable.keys()}"
    decayed = {name for name, w in trainable.items() if w.dim() >= 2 and name not in spared}
    groups = [
        {
            "params": [weight for name, weight in trainable.items() if name in decayed],
            "weight_decay": optim.weight_decay,
            "initial_lr": optim.lr,
        },
        {
            "params": [weight for name, weight in trainable.items() if name not in decayed],
            "weight_decay": 0.0,
            "initial_lr": optim.lr,
        },
    ]
    if optim.name is Optimizer.sgd:
        return torch.optim.SGD(
            groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov
        )
    # On GPUs one kernel updates all weights. None leaves the choice to PyTorch.
    fused = all(weight.is_cuda for weight in trainable.values()) or None
    first, second = optim.betas
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(first, second), eps=optim.eps, fused=fused)
