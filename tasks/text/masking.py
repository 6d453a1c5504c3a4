"""Masks: the tokens of a window that a masked language model predicts, and what replaces them.

Devlin et al., "BERT" (2019), and, with a new mask in every epoch, Liu et al., "RoBERTa" (2019).
A share of the tokens of a window is chosen, all of them ordinary. Each chosen token is replaced by
<mask>, by a random ordinary token, or by itself. The number of chosen tokens depends on the length
of the window only, as in both papers' code. Shapes therefore never change, and a compiled model is
compiled once.
"""

from dataclasses import dataclass

import numpy as np

from tasks.shared.randomness import uniforms

IGNORED = -100
"""The target at a place that does not count: PyTorch's `cross_entropy` ignores it."""


@dataclass(frozen=True)
class Masking:
    """How much of a window is masked, and how. The defaults are those of both papers."""

    share: float = 0.15
    """Share of a window's tokens that are chosen, above 0 and at most 1."""
    masked: float = 0.8
    """Probability that <mask> replaces a chosen token."""
    random: float = 0.1
    """Probability that a random ordinary token replaces it. Otherwise it stays as it is."""

    def num_chosen(self, length: int) -> int:
        """Return how many tokens of a window are chosen: the share of its `length`, which includes
        <s> and </s>, rounded, and at least 1."""
        return max(1, round(self.share * length))


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


def masked(
    rows: np.ndarray, vocabulary: Vocabulary, masking: Masking, *key: int | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mask windows, each with random numbers of its own key: (seed, epoch, sample).

    Only ordinary tokens are chosen. In a window with too few of them (a run of separators), some of
    the chosen places do not count.

    Args:
        rows: windows of token ids, int64 [B, L]; not changed.
        vocabulary: tells ordinary tokens from special ones.
        masking: how many tokens are chosen, and what replaces them.
        key: as for `tasks.shared.randomness.uniforms`; at least one part is an array.
    Returns:
        The masked windows, int64 [B, L]; the chosen places, ascending, int64 [B, K], where K is
        `masking.num_chosen(L)`; and the targets, int64 [B, K]: the original tokens, or `IGNORED` at
        places that do not count.
    """
    length = rows.shape[1]
    number = masking.num_chosen(length)
    drawn = uniforms(length + 2 * number, *key)
    rank, coin, word = np.split(drawn, [length, length + number], axis=1)
    rank[~vocabulary.words(rows)] = 2.0  # behind every ordinary token
    places = np.sort(np.argpartition(rank, number - 1, axis=1)[:, :number], axis=1)
    was = np.take_along_axis(rows, places, axis=1)
    counts = vocabulary.words(was)
    low, high = vocabulary.FIRST_WORD, vocabulary.mask
    words = low + (word * (high - low)).astype(np.int64)
    shown = np.where(coin < masking.masked + masking.random, words, was)
    shown = np.where(coin < masking.masked, vocabulary.mask, shown)
    seen = rows.copy()
    np.put_along_axis(seen, places, np.where(counts, shown, was), axis=1)
    return seen, places, np.where(counts, was, IGNORED)
