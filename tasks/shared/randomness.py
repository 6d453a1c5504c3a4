"""Random numbers that depend only on a key, and on nothing that was drawn before.

A key is a tuple of whole numbers from 0, such as (seed, epoch, sample), and starts a sequence.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

FULL_WIDTH = 768
"""Of GPT-2 small and RoBERTa base. What papers say of initial weights holds from here on."""
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""What SplitMix64 adds from word to word: 2⁶⁴ over the golden ratio."""


def generator(*key: int) -> np.random.Generator:
    """Return NumPy's generator for a key."""
    return np.random.default_rng(key)


def uniforms(count: int, *key: int | np.ndarray) -> np.ndarray:
    """Draw numbers for many keys at once: `count` numbers of each row, from 0 to below 1.

    A whole number below n is floor(u · n), for n up to 2⁵³.

    SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): word
    n of a sequence is a hash of its start plus n times a constant. The start is here a hash of the
    key.

    Args:
        count: numbers of each row.
        key: the parts of the key, below 2⁶⁴; int64 [B] where a part differs between the rows.
    Returns:
        float64 [B, count]; B is 1 where no part is an array.
    """
    start = np.zeros(1, np.uint64)
    for part in key:
        start = _hashed(start + np.asarray(part, np.uint64) + _GAMMA)
    words = _hashed(start[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GAMMA)
    return (words >> np.uint64(11)) * 2.0**-53


def _hashed(words: np.ndarray) -> np.ndarray:
    """Return SplitMix64's hash of each word: a bijection of uint64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Start PyTorch's CPU generator from the key, and restore its state at the end.

    This is for code that takes no generator (torchvision's transforms, the initial weights of a
    model). The generators of GPUs are left alone.
    """
    with torch.random.fork_rng(devices=[]):
        (state,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
        torch.default_generator.manual_seed(int(state) >> 1)
        yield


def initial_std(width: int) -> float:
    """The standard deviation of a transformer's initial weights: 0.02, as GPT-2 and RoBERTa have
    for widths of 768 and more; a narrower one has more, so that a row's sum varies as much.

    With 0.02 a model of width 64 stays near the tokens' frequencies for a time that depends on the
    learning rate in no order, and methods are told apart by how soon they leave it.
    """
    return 0.02 * max(1.0, FULL_WIDTH / width) ** 0.5
