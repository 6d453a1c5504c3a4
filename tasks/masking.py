"""Which tokens of a window a masked language model must name, and what it sees in their place.

Devlin et al., "BERT" (2019), and, with a new mask in every epoch, Liu et al., "RoBERTa" (2019).
As many ordinary tokens of a window are chosen as make 15 % of it; of the chosen, 80 % are replaced
by <mask>, 10 % by a random ordinary token, and 10 % are left as they are, by a coin each. Just
15 %, not every token by a coin: in both papers' code, too, the length of a window fixes the
number. Here it means shapes that never change, so a compiled model is compiled once.
"""

from dataclasses import dataclass

import numpy as np

from tasks.randomness import generator

SHARE = 0.15
IGNORED = -100
"""The target of a place that does not count, as `cross_entropy` has it."""


@dataclass(frozen=True)
class Vocabulary:
    """Token ids as RoBERTa lays them out: <s> 0, <pad> 1, </s> 2, <unk> 3, words, <mask> last."""

    size: int

    START, PAD, END, FIRST_WORD = 0, 1, 2, 4

    @property
    def mask(self) -> int:
        return self.size - 1

    def words(self, ids: np.ndarray) -> np.ndarray:
        """Which ids are ordinary tokens: bool, of the same shape."""
        return (ids >= self.FIRST_WORD) & (ids < self.mask)


def num_chosen(length: int) -> int:
    """Tokens chosen in a window of `length`, <s> and </s> counted: 15 %, rounded, never none."""
    return max(1, round(SHARE * length))


def masked(
    rows: np.ndarray, vocabulary: Vocabulary, keys: list[tuple[int, ...]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mask windows, each by its own key: (seed, epoch, sample).

    Only ordinary tokens are chosen. A window with too few of them (a run of separators) has
    places that do not count.

    Args:
        rows: int64 [B, L], not changed.
        keys: B of them.
    Returns:
        What the model sees, int64 [B, L]; the chosen places in it, ascending, int64 [B, K], with
        K = `num_chosen(L)`; and what stood there, int64 [B, K], `IGNORED` where it does not count.
    """
    number, length = num_chosen(rows.shape[1]), rows.shape[1]
    rank, coin = np.empty(rows.shape), np.empty((len(rows), number))
    words = np.empty((len(rows), number), np.int64)
    for row, key in enumerate(keys):
        source = generator(*key)
        rank[row] = source.random(length)
        coin[row] = source.random(number)
        words[row] = source.integers(vocabulary.FIRST_WORD, vocabulary.mask, number)

    rank[~vocabulary.words(rows)] = 2.0  # behind every ordinary token
    places = np.sort(np.argpartition(rank, number - 1, axis=1)[:, :number], axis=1)
    was = np.take_along_axis(rows, places, axis=1)
    counts = vocabulary.words(was)
    shown = np.where(coin < 0.8, vocabulary.mask, np.where(coin < 0.9, words, was))
    seen = rows.copy()
    np.put_along_axis(seen, places, np.where(counts, shown, was), axis=1)
    return seen, places, np.where(counts, was, IGNORED)
