"""A simulated replica: a model, a real inner optimizer, and its own data; and means of what
replicas hold, among it the inner Adam's moments."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
"""m and v, the fields of Adam's state."""


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

    def sizes(self) -> list[int]:
        return [parameter.numel() for parameter in self.trainable()]

    def parts(self, flat: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """What each parameter has of a flat vector."""
        pairs = zip(self.trainable(), flat.split(self.sizes()), strict=True)
        return [(parameter, part.view_as(parameter)) for parameter, part in pairs]

    def weights(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.trainable()])

    def set_weights(self, flat: Tensor) -> None:
        for parameter, part in self.parts(flat):
            parameter.detach().copy_(part)

    def gradient(self) -> Tensor:
        return torch.cat([p.grad.reshape(-1) for p in self.trainable()])

    def set_gradient(self, flat: Tensor) -> None:
        for parameter, part in self.parts(flat):
            parameter.grad = part.clone()

    def moment(self, field: str) -> Tensor:
        """One of `MOMENTS`."""
        state = self.optimizer.state
        return torch.cat([state[weight][field].reshape(-1) for weight in self.trainable()])

    def set_moment(self, field: str, flat: Tensor) -> None:
        for weight, part in self.parts(flat):
            self.optimizer.state[weight][field].copy_(part)

    def lr(self) -> float:
        """The largest learning rate of the parameter groups."""
        return max(group["lr"] for group in self.optimizer.param_groups)

    def lr_by_element(self) -> Tensor:
        """Each weight's own learning rate."""
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups for p in group["params"] if p.requires_grad]
        return torch.cat(
            [
                torch.full_like(p.detach().reshape(-1), rate)
                for p, rate in zip(self.trainable(), rates, strict=True)
            ]
        )


def mean(vectors: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(vectors)).mean(dim=0)


State = list[list[Tensor]]
"""By replica: m and v, as flat vectors."""


def moments(replicas: list[Replica]) -> State:
    return [[replica.moment(field) for field in MOMENTS] for replica in replicas]


def average(replicas: list[Replica], field: str, divisor: str | None = None) -> None:
    """Replace the moment by its mean, at once, but for where a replica's divisor is 0."""
    found = mean(replica.moment(field) for replica in replicas)
    for replica in replicas:
        own = replica.moment(field)
        still = torch.zeros_like(own) == 1 if divisor is None else replica.moment(divisor) == 0
        replica.set_moment(field, torch.where(still, own, found))


def correct(replicas: list[Replica], sent: State, steps: int) -> None:
    """Replace the share of what was sent `steps` ago that has not decayed since."""
    betas = replicas[0].optimizer.param_groups[0]["betas"]
    for number, (field, beta) in enumerate(zip(MOMENTS, betas, strict=True)):
        found = mean(own[number] for own in sent)
        for replica, own in zip(replicas, sent, strict=True):
            now = replica.moment(field) + beta**steps * (found - own[number])
            replica.set_moment(field, now.clamp(min=0) if field == "exp_avg_sq" else now)
