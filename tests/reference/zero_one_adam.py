"""0/1 Adam (2202.06009). A round is one step.

Local m, x and u; v is refreshed with averaged gradients at the steps of T_v, the 1-bit mean of u is
taken at those of T_u. Both sets are worked out beforehand.
"""

from collections.abc import Iterator

import torch

from tests.reference.onebit import TwoStages
from tests.reference.onebit_adam import flat_gradient
from tests.reference.replica import Replica, mean

HORIZON = 1000


def refreshes(freeze_step: int, kappa: int) -> list[int]:
    """T_v: k_0 = 0, k_{j+1} = k_j + 2^(j // kappa), all below the freeze."""
    steps, j = [0], 0
    while steps[-1] < freeze_step:
        steps.append(steps[-1] + 2 ** (j // kappa))
        j += 1
    return steps[:-1]


def exchanges(freeze_step: int, double_every: int, max_interval: int) -> list[int]:
    """T_u: every step before the freeze, then intervals that double every so many steps."""
    steps = [*range(freeze_step)]
    while steps[-1] < HORIZON:
        since = steps[-1] - freeze_step
        interval = 1 if since < 0 else 2 ** (since // double_every)
        steps.append(steps[-1] + min(interval, max_interval))
    return steps


def rounds(
    replicas: list[Replica], freeze_step: int, kappa: int, double_every: int, max_interval: int
) -> Iterator[None]:
    settings = replicas[0].optimizer.param_groups[0]
    (beta1, beta2), eps = settings["betas"], settings["eps"]
    due_v, due_u = (
        refreshes(freeze_step, kappa),
        exchanges(freeze_step, double_every, max_interval),
    )
    start = replicas[0].weights()
    raw_v = torch.zeros_like(start)
    m = [torch.zeros_like(start) for _ in replicas]
    u = [torch.zeros_like(start) for _ in replicas]
    lr_sum = torch.zeros_like(start)
    exchange = TwoStages(len(replicas), start)
    while True:
        t = replicas[0].steps_done
        for i, replica in enumerate(replicas):
            replica.gradients()
            m[i] = beta1 * m[i] + (1 - beta1) * flat_gradient(replica)
        if t in due_v:
            raw_v = beta2 * raw_v + (1 - beta2) * mean(map(flat_gradient, replicas)).square()
        done = sum(step <= t for step in due_v)
        divisor = (raw_v / (1 - beta2**done)).sqrt() + eps
        gamma = replicas[0].lr_by_element()
        keep = 1 - gamma * settings["weight_decay"]
        start, lr_sum = keep * start, lr_sum + gamma
        u = [u[i] + gamma * m[i] for i in range(len(replicas))]
        for i, replica in enumerate(replicas):
            replica.set_weights(keep * replica.weights() - gamma * m[i] / divisor)
            replica.steps_done += 1
        if t in due_u:
            average = exchange.mean(u)
            start = start - average / divisor
            for replica in replicas:
                replica.set_weights(start)
            m = [average / lr_sum for _ in replicas]
            u = [torch.zeros_like(start) for _ in replicas]
            lr_sum = torch.zeros_like(start)
        yield
