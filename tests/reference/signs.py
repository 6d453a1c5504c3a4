"""1-bit Adam and 0/1 Adam. A round is one step."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tests.reference.gradients import allreduce
from tests.reference.replica import Replica, mean
from tests.reference.two_stages import TwoStages


def onebit_adam(
    replicas: list[Replica],
    freeze_step: int,
    compress: str = "momentum",
    mask_below: float = 0.01,
) -> Iterator[None]:
    """1-bit Adam (2102.02888). A round is one step.

    Until the freeze it is AllReduce under the real AdamW, whose moments are then taken over. After
    it v stands still, and x <- x - gamma m_hat / (sqrt(v_hat) + eps) with the 1-bit mean of the
    momenta, or, to compress the update, that of the momenta in units of sqrt(v) + eps. The mean is
    0 where v is, and for momenta also where v is small beside its tensor's median.
    """
    averaged = allreduce(replicas)
    for _ in range(freeze_step):
        yield next(averaged)
    settings = replicas[0].optimizer.param_groups[0]
    (beta1, beta2), eps = settings["betas"], settings["eps"]
    raw_v = replicas[0].moment("exp_avg_sq")
    v = raw_v / (1 - beta2**freeze_step)
    alive, unit = raw_v != 0, raw_v.sqrt() + eps
    if compress == "momentum":
        alive, unit = not_small(raw_v, replicas[0].sizes(), mask_below), torch.ones_like(v)
    m = replicas[0].moment("exp_avg")
    exchange = TwoStages(len(replicas), m, replicas[0].sizes())
    while True:
        for replica in replicas:
            replica.gradients()
        local = [beta1 * m + (1 - beta1) * r.gradient() for r in replicas]
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


HORIZON = 1000


def refreshes(freeze_step: int, kappa: int) -> list[int]:
    """T_v: k_0 = 0, k_{j+1} = k_j + 2^(j // kappa), all below the freeze."""
    steps, j = [0], 0
    while steps[-1] < freeze_step:
        steps.append(steps[-1] + 2 ** (j // kappa))
        j += 1
    return steps[:-1]


def exchanges(
    freeze_step: int,
    double_every: int | None,
    max_interval: int,
    lr: Callable[[int], float] = lambda step: 1.0,
) -> list[int]:
    """T_u: every step before the freeze, then intervals that double every so many steps, or (None)
    whenever the learning rate has halved."""
    steps = [*range(freeze_step)]
    while steps[-1] < HORIZON:
        t = steps[-1]
        interval = 1
        if t >= freeze_step and double_every is None:
            peak = max(lr(step) for step in range(t + 1))
            while interval < max_interval and lr(t) <= peak / (2 * interval) * (1 + 1e-9):
                interval *= 2
        elif t >= freeze_step and double_every is not None:
            interval = 2 ** ((t - freeze_step) // double_every)
        steps.append(t + min(interval, max_interval))
    return steps


def zero_one_adam(
    replicas: list[Replica],
    freeze_step: int,
    kappa: int,
    double_every: int,
    max_interval: int,
    compress: str = "momentum",
    mask_below: float = 0.01,
) -> Iterator[None]:
    """0/1 Adam (2202.06009). A round is one step.

    Local m, x and u; v is refreshed with averaged gradients at the steps of T_v, and m takes these
    in; the 1-bit mean of u is taken at the other steps of T_u (to compress the update, in units of
    sqrt(v) + eps). Both sets are worked out beforehand. Where v is 0, or for compressed momentum
    small beside its tensor's median, a mean is 0. Where v is 0, weights only decay.
    """
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
    exchange = TwoStages(len(replicas), start, replicas[0].sizes())
    while True:
        t = replicas[0].steps_done
        for replica in replicas:
            replica.gradients()
        g = [replica.gradient() for replica in replicas]
        if t in due_v:
            g = [mean(g)] * len(replicas)
            raw_v = beta2 * raw_v + (1 - beta2) * g[0].square()
        m = [beta1 * m[i] + (1 - beta1) * g[i] for i in range(len(replicas))]
        done = sum(step <= t for step in due_v)
        alive = raw_v != 0
        unit = (raw_v / (1 - beta2**done)).sqrt() + eps
        divisor = torch.where(alive, unit, torch.inf)
        moved, scaled = alive, unit
        if compress == "momentum":
            moved = not_small(raw_v, replicas[0].sizes(), mask_below)
            scaled = torch.ones_like(unit)
        gamma = replicas[0].lr_by_element()
        keep = 1 - gamma * settings["weight_decay"]
        start, lr_sum = keep * start, lr_sum + gamma
        u = [u[i] + gamma * m[i] for i in range(len(replicas))]
        for i, replica in enumerate(replicas):
            replica.set_weights(keep * replica.weights() - gamma * m[i] / divisor)
            replica.steps_done += 1
        if t in due_u:
            if t in due_v:
                average = mean(u)
            else:
                average = scaled * exchange.mean([own / scaled for own in u], moved)
            start = start - average / divisor
            for replica in replicas:
                replica.set_weights(start)
            m = [average / lr_sum for _ in replicas]
            u = [torch.zeros_like(start) for _ in replicas]
            lr_sum = torch.zeros_like(start)
        yield
