"""The inner optimizer that the tasks share."""

from collections.abc import Collection

import torch
from torch import nn

from co2.config import OptimConfig, Optimizer


def make_optimizer(
    model: nn.Module, optim: OptimConfig, spared: Collection[str] = ()
) -> torch.optim.Optimizer:
    """AdamW or SGD over the trainable weights of `model`.

    Two groups, in this order: weights of two or more dimensions, with weight decay; all others
    (biases, norms), without, because shrinking a scale or a shift regularizes nothing. So are
    those named in `spared` (positions, class tokens). Both groups exist even if one is empty, so
    that checkpoints look alike. Each keeps the peak rate as "initial_lr",
    from which a schedule works out "lr".
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
    # One kernel for all weights where there is one; PyTorch's own choice elsewhere.
    fused = all(weight.is_cuda for weight in trainable.values()) or None
    first, second = optim.betas
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(first, second), eps=optim.eps, fused=fused)
