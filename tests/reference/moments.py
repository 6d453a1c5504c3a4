"""The inner Adam's moments, averaged over the replicas, at once or some steps late."""

import torch
from torch import Tensor

from tests.reference.replica import Replica, mean

FIELDS = ("exp_avg", "exp_avg_sq")
State = list[list[Tensor]]
"""By replica: m and v, as flat vectors."""


def moments(replicas: list[Replica]) -> State:
    return [[read(replica, field) for field in FIELDS] for replica in replicas]


def read(replica: Replica, field: str) -> Tensor:
    state = replica.optimizer.state
    return torch.cat([state[weight][field].reshape(-1) for weight in replica.trainable()])


def write(replica: Replica, field: str, flat: Tensor) -> None:
    weights = replica.trainable()
    for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
        replica.optimizer.state[weight][field].copy_(part.view_as(weight))


def average(replicas: list[Replica], field: str, divisor: str | None = None) -> None:
    """Replace the moment by its mean, at once, but for where a replica's divisor is 0."""
    found = mean(read(replica, field) for replica in replicas)
    for replica in replicas:
        own = read(replica, field)
        still = torch.zeros_like(own) == 1 if divisor is None else read(replica, divisor) == 0
        write(replica, field, torch.where(still, own, found))


def correct(replicas: list[Replica], sent: State, steps: int) -> None:
    """Replace the share of what was sent `steps` ago that has not decayed since."""
    betas = replicas[0].optimizer.param_groups[0]["betas"]
    for number, (field, beta) in enumerate(zip(FIELDS, betas, strict=True)):
        found = mean(own[number] for own in sent)
        for replica, own in zip(replicas, sent, strict=True):
            now = read(replica, field) + beta**steps * (found - own[number])
            write(replica, field, now.clamp(min=0) if field == "exp_avg_sq" else now)
