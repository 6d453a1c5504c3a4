"""Fingerprint: what a run trains on and with. Runs of one comparison must agree in it.

It has a digest of the first batches and one of the initial weights, the first loss, and the
versions of the task's and the method's code. The digests are equal on all processors, though sums,
and with them the loss, are rounded differently.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

BATCHES = 2
"""Micro-batches of every worker that are digested. The first alone may be equal under two random
generators that differ later."""
FIRST = 2
"""Steps after which the fingerprint is known."""
_TAKEN = 4096
"""Elements of a tensor of floats that count, evenly spaced: enough to tell tensors apart, and few
enough for any size of model."""
Fingerprint = Mapping[str, Any]
"""The keys data, weights, task, method and loss. `Any`: JSON."""


def digest(tensors: Any) -> str:
    """Of a tensor, or of a tuple or a dict of tensors, as eight hexadecimal digits.

    Of integers all bits count. Of floats it is their size and a sum with pseudo-random weights,
    both to three digits, because processors differ in the last bits.
    """
    found = hashlib.sha256()
    for tensor in tree_leaves(tensors):
        found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(_floats(tensor) if tensor.is_floating_point() else _bytes(tensor))
    return found.hexdigest()[:8]


def combined(digests: list[str]) -> str:
    """One digest for several, such as all workers'."""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:8]


def text(fingerprint: Fingerprint) -> str:
    """As results/runs.csv has it: `data 3f2a91bc weights 91bc02d1 task 1 method 1 loss 6.9078`.
    Empty for none."""
    return " ".join(
        f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in fingerprint.items()
    )


def parts(written: str) -> dict[str, str]:
    """The reverse of `text`, with texts as values."""
    words = written.split()
    return dict(zip(words[::2], words[1::2], strict=True))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _floats(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    taken = flat[:: max(1, math.ceil(len(flat) / _TAKEN))].double().cpu().numpy()
    weights = np.random.default_rng(len(taken)).integers(-1000, 1001, len(taken)) / 1000
    size = math.sqrt(float(np.square(taken).mean())) if len(taken) else 0.0
    total = float(taken @ weights) / (size * math.sqrt(len(taken))) if size else 0.0
    return f"{size:.2e} {round(total, 3) + 0.0:.3f}".encode()
