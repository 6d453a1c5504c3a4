"""SlowMo (Wang et al., 1910.00643).

m_t = beta m_{t-1} + d_t / gamma_t;  x_{t+1,0} = x_{t,0} - alpha gamma_t m_t, with gamma_t of each
weight's own parameter group. Where gamma_t = 0 nothing is scaled: m_t = beta m_{t-1} + d_t and
x_{t+1,0} = x_{t,0} - alpha d_t.
"""

from collections.abc import Iterator

import torch

from tests.reference.replica import Replica, mean


def rounds(
    replicas: list[Replica], tau: int, outer_lr: float, outer_momentum: float
) -> Iterator[None]:
    start = replicas[0].weights()
    m = torch.zeros_like(start)
    while True:
        for replica in replicas:
            replica.train(tau)
        d = mean(start - replica.weights() for replica in replicas)
        gamma = replicas[0].lr_by_element()
        cold = gamma == 0
        m = outer_momentum * m + torch.where(cold, d, d / gamma)
        start = start - outer_lr * torch.where(cold, d, gamma * m)
        for replica in replicas:
            replica.set_weights(start)
        yield
