"""Random numbers that depend only on a key, and on nothing that was drawn before.

A key is a tuple of whole numbers from 0, such as (seed, epoch, sample), and starts a sequence. To
start a sequence costs more than to draw the few numbers that a sample needs. Batches therefore
start the sequences of all their samples at once; the numbers are the same as one by one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence

FULL_WIDTH = 768
"""Of GPT-2 small and RoBERTa base. What papers say of initial weights holds from here on."""
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""What SplitMix64 adds from word to word: 2⁶⁴ over the golden ratio."""
_POOL = 4
"""Words of 32 bits in the pool of NumPy's SeedSequence."""


def generator(*key: int) -> np.random.Generator:
    """Return NumPy's generator for a key."""
    return np.random.default_rng(key)


def generators(*key: int | np.ndarray) -> Iterator[np.random.Generator]:
    """Yield `generator(*key)` for each row of the key, at a tenth of its cost.

    Args:
        key: the parts of the key. At least one is an array, int64 [B]; the others are the same for
            all rows.
    """
    for state in _seed_states(4, *key):
        # NumPy documents that any ISeedSequence is accepted; its types allow only SeedSequence.
        yield np.random.Generator(np.random.PCG64(_Seed(state)))  # type: ignore[arg-type]


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


@contextmanager
def resumed(seed: int, used: int) -> Iterator[None]:
    """Do what `seeded` does with one of `seeds`, and skip its first `used` words of 32 bits."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        torch.empty(used).uniform_()
        yield


def seeds(*key: int | np.ndarray) -> list[int]:
    """Return the seed that `seeded` gives PyTorch's generator, for each row of a key as in
    `generators`."""
    return [int(state) >> 1 for state in _seed_states(1, *key)[:, 0]]


class Draws:
    """The first numbers that PyTorch's CPU generator draws after each of B seeds.

    Each method draws the next number of every row at once. It is the number that the function of
    PyTorch named there would draw. A row that is not `chosen` (bool [B]) draws nothing, and the
    number returned for it has no meaning.

    Args:
        seeds: the B seeds, as from the function `seeds`.
        most: largest number of words of 32 bits that a row draws; a number takes one word.
    """

    def __init__(self, seeds: list[int], most: int) -> None:
        raw = torch.empty(len(seeds), (most + 1) // 2, dtype=torch.int64)
        source = torch.Generator()
        for seed, row in zip(seeds, raw.unbind(), strict=True):
            source.manual_seed(seed)
            row.random_(-(2**63), None, generator=source)
        # PyTorch joins two words to 64 bits, with the first as the upper half.
        self._words = raw.numpy().view(np.uint64).astype(">u8").view(">u4").astype(np.uint32)
        self._rows = np.arange(len(seeds))
        self.used = np.zeros(len(seeds), np.int64)
        """Number of words that each row has drawn, int64 [B]."""

    def uniform(self, low: float, high: float, chosen: np.ndarray | bool = True) -> np.ndarray:
        """Draw as `torch.empty(()).uniform_(low, high)` does: float32 [B]."""
        share = (self._next(chosen) & np.uint32((1 << 24) - 1)).astype(np.float32)
        share *= np.float32(2**-24)
        # PyTorch's vectorized code rounds once, after product and sum; in float64 both are exact.
        width = np.float64(np.float32(high) - np.float32(low))
        return (share * width + np.float64(np.float32(low))).astype(np.float32)

    def integers(self, high: np.ndarray | int, chosen: np.ndarray | bool = True) -> np.ndarray:
        """Draw as `torch.randint(high, ())` does, for a `high` (int64 [B]) below 2²⁸: int64 [B]."""
        return self._next(chosen).astype(np.int64) % high

    def skip(self, count: int, chosen: np.ndarray | bool = True) -> None:
        """Draw `count` words and discard them."""
        self.used += np.where(chosen, count, 0)

    def _next(self, chosen: np.ndarray | bool) -> np.ndarray:
        words = self._words[self._rows, self.used]
        self.used += chosen
        return words


class _Seed(ISeedSequence):
    """A seed sequence whose words have been computed already, for one bit generator."""

    def __init__(self, state: np.ndarray) -> None:
        self._state = state

    def generate_state(self, n_words: int, dtype: object = np.uint32) -> np.ndarray:
        assert n_words == len(self._state) and dtype is self._state.dtype.type
        return self._state


def _seed_states(num_words: int, *key: int | np.ndarray) -> np.ndarray:
    """Return `np.random.SeedSequence(key).generate_state(num_words, np.uint64)` for each row of a
    key.

    NumPy documents that this algorithm, which is that of M. E. O'Neill's randutils, does not
    change. A test compares the two.

    Args:
        key: as for `generators`; arrays hold numbers below 2³².
    Returns:
        uint64 [B, num_words].
    """
    size = max(len(part) for part in key if isinstance(part, np.ndarray))
    words = [np.broadcast_to(word, size) for part in key for word in _words(part)]
    words += [np.zeros(size, np.uint32)] * (_POOL - len(words))
    constants = _constants(0x43B0D7E5, 0x931E8875, _POOL * len(words) + 1)
    pool, done = _old_hashed(np.stack(words[:_POOL]), constants[: _POOL + 1]), _POOL
    for source in range(_POOL):
        others = [target for target in range(_POOL) if target != source]
        hashes = _old_hashed(pool[source], constants[done : done + _POOL])
        pool[others] = _mixed(pool[others], hashes)
        done += len(others)
    for word in words[_POOL:]:
        pool = _mixed(pool, _old_hashed(word, constants[done : done + _POOL + 1]))
        done += _POOL
    chosen = [number % _POOL for number in range(2 * num_words)]
    states = _old_hashed(pool[chosen], _constants(0x8B51F9DD, 0x58F38DED, 2 * num_words + 1))
    return np.ascontiguousarray(states.T).astype("<u4").view("<u8").astype(np.uint64)


def _constants(first: int, multiplier: int, count: int) -> np.ndarray:
    """A geometric sequence modulo 2³², uint32 [count, 1]."""
    powers = [first * pow(multiplier, number, 1 << 32) & 0xFFFFFFFF for number in range(count)]
    return np.array(powers, np.uint32)[:, None]


def _old_hashed(values: np.ndarray, constants: np.ndarray) -> np.ndarray:
    """Hash `values`, or their row n, into row n of the result, with the constants n and n + 1."""
    mixed: np.ndarray = (values ^ constants[:-1]) * constants[1:]
    return mixed ^ (mixed >> 16)


def _mixed(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    values: np.ndarray = first * np.uint32(0xCA01F9DD) - second * np.uint32(0x4973F715)
    return values ^ (values >> 16)


def _words(part: int | np.ndarray) -> list[np.ndarray]:
    """Divide a part of a key into words of 32 bits, the lowest first."""
    if isinstance(part, np.ndarray):
        return [part.astype(np.uint32)]
    words = [part & 0xFFFFFFFF]
    while part := part >> 32:
        words.append(part & 0xFFFFFFFF)
    return [np.array(word, np.uint32) for word in words]
