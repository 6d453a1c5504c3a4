"""1-bit Adam (2102.02888). A round is one step.

Until the freeze it is AllReduce under the real AdamW, whose moments are then taken over. After it
v stands still, and x <- x - gamma m_hat / (sqrt(v_hat) + eps) with the 1-bit mean of the momenta,
or, to compress the update, that of the momenta in units of sqrt(v) + eps. The mean is 0 where v is,
and for momenta also where v is small beside its tensor's median.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.reference import allreduce
from tests.reference.replica import Replica
from tests.reference.two_stages import TwoStages


def rounds(
    replicas: list[Replica],
    freeze_step: int,
    compress: str = "momentum",
    mask_below: float = 0.01,
) -> Iterator[None]:
    averaged = allreduce.rounds(replicas)
    for _ in range(freeze_step):
        yield next(averaged)
    settings = replicas[0].optimizer.param_groups[0]
    (beta1, beta2), eps = settings["betas"], settings["eps"]
    raw_v = moments(replicas[0], "exp_avg_sq")
    v = raw_v / (1 - beta2**freeze_step)
    alive, unit = raw_v != 0, raw_v.sqrt() + eps
    if compress == "momentum":
        alive, unit = not_small(raw_v, sizes(replicas[0]), mask_below), torch.ones_like(v)
    m = moments(replicas[0], "exp_avg")
    exchange = TwoStages(len(replicas), m, sizes(replicas[0]))
    while True:
        for replica in replicas:
            replica.gradients()
        local = [beta1 * m + (1 - beta1) * flat_gradient(r) for r in replicas]
        m = unit * exchange.mean([own / unit for own in local], alive)
        for replica in replicas:
            replica.steps_done += 1
            gamma, m_hat = replica.lr_by_element(), m / (1 - beta1**replica.steps_done)
            decayed = (1 - gamma * settings["weight_decay"]) * replica.weights()
            replica.set_weights(decayed - gamma * m_hat / (v.sqrt() + eps))
        yield


def not_small(v: Tensor, sizes: list[int], mask_below: float) -> Tensor:
    """Where v is above 0 and at least this share of the median of its tensor's v above 0."""
    alive = []
    for part in v.split(sizes):
        seen = sorted(part[part > 0].tolist())
        median = seen[(len(seen) - 1) // 2] if seen else 0.0
        alive.append((part > 0) & (part >= mask_below * median))
    return torch.cat(alive)


def sizes(replica: Replica) -> list[int]:
    return [parameter.numel() for parameter in replica.trainable()]


def flat_gradient(replica: Replica) -> Tensor:
    return torch.cat([parameter.grad.reshape(-1) for parameter in replica.trainable()])


def moments(replica: Replica, name: str) -> Tensor:
    state = replica.optimizer.state
    return torch.cat([state[parameter][name].reshape(-1) for parameter in replica.trainable()])
