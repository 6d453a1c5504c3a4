"""The two-stage compressed mean of G vectors, all in one place (2102.02888), tensor by tensor."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.reference.replica import mean


def sign(x: Tensor) -> Tensor:
    """C(x) = (|x| / sqrt n) sign(x), with sign(0) = +1."""
    magnitude = (x.square().sum() / max(len(x), 1)).sqrt()
    return torch.where(x >= 0, magnitude, -magnitude)


def uniform(bits: int) -> Callable[[Tensor], Tensor]:
    """Whole multiples of the largest magnitude over 7 or 127."""

    def compress(x: Tensor) -> Tensor:
        if len(x) == 0 or not x.any():
            return torch.zeros_like(x)
        step = x.abs().max() / (2 ** (bits - 1) - 1)
        return step * (x / step).round()

    return compress


COMPRESS = {"sign": sign, "int4": uniform(4), "int8": uniform(8)}


class TwoStages:
    """Worker i has an error of its own; server j has one for chunk j, of ceil(n / G) elements.

    Args:
        sizes: elements of the tensors that a vector is made of.
    """

    def __init__(self, workers: int, like: Tensor, sizes: list[int], kind: str = "sign") -> None:
        size = -(-len(like) // workers)
        self.compress = COMPRESS[kind]
        self.tensor_of = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        self.cuts = [slice(j * size, (j + 1) * size) for j in range(workers)]
        self.worker_errors = [torch.zeros_like(like) for _ in range(workers)]
        self.server_errors = [torch.zeros_like(like[cut]) for cut in self.cuts]

    def mean(self, vectors: list[Tensor], alive: Tensor | None = None) -> Tensor:
        """Where `alive` is False, nothing is sent, and nothing is left over."""
        alive = torch.ones_like(self.tensor_of, dtype=torch.bool) if alive is None else alive
        arrived = []
        for i, vector in enumerate(vectors):
            corrected = (vector + self.worker_errors[i]) * alive
            arrived.append(self.by_tensor(corrected, self.tensor_of, alive))
            self.worker_errors[i] = corrected - arrived[i]
        chunks = []
        for j, cut in enumerate(self.cuts):
            received = mean(vector[cut] for vector in arrived)
            corrected = (received + self.server_errors[j]) * alive[cut]
            chunks.append(self.by_tensor(corrected, self.tensor_of[cut], alive[cut]))
            self.server_errors[j] = corrected - chunks[j]
        return torch.cat(chunks)

    def by_tensor(self, x: Tensor, tensor_of: Tensor, alive: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        for number in tensor_of.unique():
            members = (tensor_of == number) & alive
            found[members] = self.compress(x[members])
        return found
