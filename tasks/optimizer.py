"""The inner optimizer that the tasks share."""

import torch
from torch import nn

from co2.config import OptimConfig, Optimizer


def make_optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    """AdamW or SGD over the trainable weights of `model`.

    Two groups, in this order: weights of two or more dimensions, with weight decay; all others
    (biases, norms), without, because shrinking a scale or a shift regularizes nothing. Both exist
    even if one is empty, so that checkpoints look alike. Each keeps the peak rate as "initial_lr",
    from which a schedule works out "lr".
    """
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    assert trainable, "the model has no trainable weight"
    groups = [
        {
            "params": [weight for weight in trainable if weight.dim() >= 2],
            "weight_decay": optim.weight_decay,
            "initial_lr": optim.lr,
        },
        {
            "params": [weight for weight in trainable if weight.dim() < 2],
            "weight_decay": 0.0,
            "initial_lr": optim.lr,
        },
    ]
    if optim.name is Optimizer.sgd:
        return torch.optim.SGD(
            groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov
        )
    # One kernel for all weights where there is one; PyTorch's own choice elsewhere.
    fused = all(weight.is_cuda for weight in trainable) or None
    first, second = optim.betas
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(first, second), eps=optim.eps, fused=fused)
