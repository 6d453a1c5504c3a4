"""CoCoD-SGD (Shen et al., 1906.12043).

p^i_t = x^i_{t,tau} - x^i_{t,0} is averaged during round t + 1 into delta_t, and
x^i_{t+1,0} = x^i_{t,tau} + (delta_{t-1} - p^i_{t-1}), with delta_{-1} = p_{-1} = 0. Early rounds
wait for delta_t and take in that.
"""

from collections.abc import Iterator

import torch

from tests.reference.replica import Replica, mean


def rounds(replicas: list[Replica], tau: int, blocking_share: float = 0.0) -> Iterator[None]:
    last_progress = [torch.zeros_like(replica.weights()) for replica in replicas]
    while True:
        starts = [replica.weights() for replica in replicas]
        for replica in replicas:
            replica.train(tau)
        ends = [replica.weights() for replica in replicas]
        delta = mean(last_progress)
        for replica, end, progress in zip(replicas, ends, last_progress, strict=True):
            replica.set_weights(end + (delta - progress))
        last_progress = [end - start for start, end in zip(starts, ends, strict=True)]
        if replicas[0].is_early(blocking_share):
            delta = mean(last_progress)
            for replica, start in zip(replicas, starts, strict=True):
                replica.set_weights(start + delta)
            last_progress = [torch.zeros_like(delta) for _ in replicas]
        yield
