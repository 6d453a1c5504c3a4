"""Random numbers that depend on what they are for, and on nothing that happened before."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def generator(*key: int) -> np.random.Generator:
    """A generator of its own for a key of whole numbers from 0, such as (seed, epoch, sample)."""
    return np.random.default_rng(key)


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Inside: PyTorch's CPU generator starts from the key. After: it goes on as if untouched.

    For libraries that take no generator (torchvision's transforms, the initial weights of a
    model); GPU generators are left alone.
    """
    with torch.random.fork_rng(devices=[]):
        (state,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
        torch.default_generator.manual_seed(int(state) >> 1)
        yield
