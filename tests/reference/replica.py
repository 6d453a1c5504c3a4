"""One simulated replica: a model, a real inner optimizer, and its own data."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Replica:
    """A replica whose trainable weights read and write as one flat vector.

    Args:
        model, optimizer: the replica's own copies.
        backward: `backward(model, step)` leaves gradients on the weights.
        set_lr: `set_lr(optimizer, step)` sets the learning rates of one step.
        total: steps of the whole training.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        backward: Callable[[nn.Module, int], None],
        set_lr: Callable[[Optimizer, int], None],
        total: int = 0,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.backward, self.set_lr = backward, set_lr
        self.steps_done, self.total = 0, total

    def gradients(self) -> None:
        """The first half of an inner step: learning rates and gradients."""
        self.optimizer.zero_grad()
        self.set_lr(self.optimizer, self.steps_done)
        self.backward(self.model, self.steps_done)

    def update(self) -> None:
        """The second half of an inner step: the optimizer's."""
        self.optimizer.step()
        self.steps_done += 1

    def train(self, tau: int) -> None:
        """`tau` inner steps."""
        for _ in range(tau):
            self.gradients()
            self.update()

    def is_early(self, share: float) -> bool:
        """Whether the steps done belong to this share of the training."""
        return self.steps_done <= share * self.total

    def trainable(self) -> list[nn.Parameter]:
        """What takes part: parameters of the optimizer that require a gradient, in its order."""
        return [p for g in self.optimizer.param_groups for p in g["params"] if p.requires_grad]

    def weights(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.trainable()])

    def set_weights(self, flat: Tensor) -> None:
        parameters = self.trainable()
        parts = flat.split([p.numel() for p in parameters])
        with torch.no_grad():
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.copy_(part.view_as(parameter))

    def lr(self) -> float:
        """The largest learning rate of the parameter groups."""
        return max(group["lr"] for group in self.optimizer.param_groups)

    def lr_by_element(self) -> Tensor:
        """Each weight's own learning rate."""
        rates = [
            torch.full((p.numel(),), group["lr"], dtype=p.dtype)
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        ]
        return torch.cat(rates)


def mean(vectors: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(vectors)).mean(dim=0)
