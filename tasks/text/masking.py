"""Masks: the tokens of a window that a masked language model predicts, and what replaces them.

Devlin et al., "BERT" (2019), and, with a new mask in every epoch, Liu et al., "RoBERTa" (2019).
15 % of the tokens of a window are chosen, all of them ordinary. Each chosen token is replaced by
<mask> with probability 0.8, by a random ordinary token with probability 0.1, and left as it is
otherwise. The number of chosen tokens depends on the length of the window only, as in both papers'
code. Shapes therefore never change, and a compiled model is compiled once.
"""

from dataclasses import dataclass

import numpy as np

from tasks.shared.randomness import generator, generators

SHARE = 0.15
IGNORED = -100
"""The target at a place that does not count: PyTorch's `cross_entropy` ignores it."""


@dataclass(frozen=True)
class Vocabulary:
    """Token ids in RoBERTa's order: <s> 0, <pad> 1, </s> 2, <unk> 3, words, <mask> last."""

    size: int

    START, PAD, END, FIRST_WORD = 0, 1, 2, 4

    @property
    def mask(self) -> int:
        return self.size - 1

    def words(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids are ordinary tokens: bool, of the same shape."""
        return (ids >= self.FIRST_WORD) & (ids < self.mask)


def num_chosen(length: int) -> int:
    """Return how many tokens of a window are chosen: 15 % of its `length`, which includes <s> and
    </s>, rounded, and at least 1."""
    return max(1, round(SHARE * length))


def masked(
    rows: np.ndarray, vocabulary: Vocabulary, *key: int | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mask windows, each with random numbers of its own key: (seed, epoch, sample).

    Only ordinary tokens are chosen. In a window with too few of them (a run of separators), some of
    the chosen places do not count.

    Args:
        rows: windows of token ids, int64 [B, L]; not changed.
        vocabulary: tells ordinary tokens from special ones.
        key: as for `tasks.shared.randomness.generators`.
    Returns:
        The masked windows, int64 [B, L]; the chosen places, ascending, int64 [B, K], where K is
        `num_chosen(L)`; and the targets, int64 [B, K]: the original tokens, or `IGNORED` at places
        that do not count.
    """
    number = num_chosen(rows.shape[1])
    rank, coin, words = _drawn(rows.shape[1], number, vocabulary, *key)
    rank[~vocabulary.words(rows)] = 2.0  # behind every ordinary token
    places = np.sort(np.argpartition(rank, number - 1, axis=1)[:, :number], axis=1)
    was = np.take_along_axis(rows, places, axis=1)
    counts = vocabulary.words(was)
    shown = np.where(coin < 0.8, vocabulary.mask, np.where(coin < 0.9, words, was))
    seen = rows.copy()
    np.put_along_axis(seen, places, np.where(counts, shown, was), axis=1)
    return seen, places, np.where(counts, was, IGNORED)


def _drawn(
    length: int, number: int, vocabulary: Vocabulary, *key: int | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what each row's generator draws: random(length), random(number), and `number` ordinary
    tokens.

    One call draws the bits of a row, and all rows are converted to numbers together, in NumPy's own
    way. Calling NumPy's functions for every row takes five times longer.
    """
    low, count = vocabulary.FIRST_WORD, vocabulary.mask - vocabulary.FIRST_WORD
    doubles = length + number
    sources = [source.bit_generator for source in generators(*key)]
    bits = np.stack([source.random_raw(doubles + (number + 1) // 2) for source in sources])
    shares = (bits[:, :doubles] >> np.uint64(11)) * 2.0**-53
    # An integer takes 32 bits, the lower half of 64 first. The method is Lemire's, "Fast random
    # integer generation in an interval" (2019); it rejects fewer than count / 2³² of the draws.
    halves = bits[:, doubles:].astype("<u8").view("<u4")[:, :number].astype(np.uint64)
    products = halves * np.uint64(count)
    words = low + (products >> np.uint64(32)).astype(np.int64)
    rejected = (products & np.uint64(0xFFFFFFFF)) < (1 << 32) % count
    for row in np.flatnonzero(rejected.any(axis=1)).tolist():
        source = generator(*(int(np.broadcast_to(part, len(bits))[row]) for part in key))
        source.random(doubles)
        words[row] = source.integers(low, vocabulary.mask, number)
    return shares[:, :length], shares[:, length:], words
