"""Methods around an inner Adam, whose moments they average."""

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor

from tests.reference.replica import MOMENTS, Replica, average, mean


def desloc(
    replicas: list[Replica], tau: int, first_moment_every: int, second_moment_every: int
) -> Iterator[None]:
    """DES-LOC (2505.22549): weights, first and second moments are averaged, each after its own
    period.

    A round is one step here, because the periods need not be multiples of each other.
    """
    for step in count(1):
        for replica in replicas:
            replica.train(1)
        if step % tau == 0:
            x = mean(replica.weights() for replica in replicas)
            for replica in replicas:
                replica.set_weights(x)
        first, second = MOMENTS
        if step % second_moment_every == 0:
            average(replicas, second)
        if step % first_moment_every == 0:
            average(replicas, first, divisor=second)
        yield


def mt_dao(
    replicas: list[Replica],
    tau: int,
    slow_beta: float,
    slow_weight: float,
    first_moment_every: int,
    second_moment_every: int,
    late_momentum: bool = False,
) -> Iterator[None]:
    """MT-DAO (2510.05361) with one slow momentum: Adam in quasi-hyperbolic form, with local steps.

    u <- beta u + (1 - beta) g; x <- x - gamma ((1 - omega) g + omega u_hat) / (sqrt(v_hat) + eps).
    Weights, u and v are averaged, each after its own period. A late mean of u is that of the end of
    one round, and beta^tau of it counts at the end of the next. A round is one step here.
    """
    settings = replicas[0].optimizer.param_groups[0]
    beta2, eps, decay = settings["betas"][1], settings["eps"], settings["weight_decay"]
    u = [torch.zeros_like(replica.weights()) for replica in replicas]
    v = [torch.zeros_like(replica.weights()) for replica in replicas]
    sent: list[Tensor] = []
    for step in count(1):
        for i, replica in enumerate(replicas):
            replica.gradients()
            g = replica.gradient()
            u[i] = slow_beta * u[i] + (1 - slow_beta) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g * g
            direction = (1 - slow_weight) * g + slow_weight * u[i] / (1 - slow_beta**step)
            gamma, size = replica.lr_by_element(), (v[i] / (1 - beta2**step)).sqrt() + eps
            x = replica.weights()
            replica.set_weights(x - gamma * direction / size - gamma * decay * x)
            replica.steps_done += 1
        if step % tau == 0:
            x = mean(replica.weights() for replica in replicas)
            for replica in replicas:
                replica.set_weights(x)
            if sent:
                news = [slow_beta**tau * (mean(sent) - own) for own in sent]
                u = [now + new * (w != 0) for now, new, w in zip(u, news, v, strict=True)]
                sent = []
            if late_momentum and step % first_moment_every == 0:
                sent = list(u)
        if step % second_moment_every == 0:
            v = [mean(v)] * len(v)
        if not late_momentum and step % first_moment_every == 0:
            found = mean(u)
            u = [torch.where(w == 0, own, found) for own, w in zip(u, v, strict=True)]
        yield
