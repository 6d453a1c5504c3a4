"""The two-stage 1-bit mean of G vectors, all in one place (2102.02888)."""

import torch
from torch import Tensor

from tests.reference.replica import mean


def compress(x: Tensor) -> Tensor:
    """C(x) = (|x| / sqrt n) sign(x), with sign(0) = +1."""
    magnitude = (x.square().sum() / max(len(x), 1)).sqrt()
    return torch.where(x >= 0, magnitude, -magnitude)


class TwoStages:
    """Worker i has an error of its own; server j has one for chunk j, of ceil(n / G) elements."""

    def __init__(self, workers: int, like: Tensor) -> None:
        size = -(-len(like) // workers)
        self.cuts = [slice(j * size, (j + 1) * size) for j in range(workers)]
        self.worker_errors = [torch.zeros_like(like) for _ in range(workers)]
        self.server_errors = [torch.zeros_like(like[cut]) for cut in self.cuts]

    def mean(self, vectors: list[Tensor]) -> Tensor:
        arrived = []
        for i, vector in enumerate(vectors):
            corrected = vector + self.worker_errors[i]
            arrived.append(compress(corrected))
            self.worker_errors[i] = corrected - arrived[i]
        chunks = []
        for j, cut in enumerate(self.cuts):
            corrected = mean(vector[cut] for vector in arrived) + self.server_errors[j]
            chunks.append(compress(corrected))
            self.server_errors[j] = corrected - chunks[j]
        return torch.cat(chunks)
