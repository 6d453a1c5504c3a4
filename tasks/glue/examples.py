"""Labelled examples of one or two pieces of text, as rows of token ids."""

from dataclasses import dataclass

import numpy as np

from tasks.text.masking import Vocabulary
from tasks.text.store import Store


@dataclass(frozen=True)
class Examples:
    """Pieces of one array of tokens, and a label for each example."""

    tokens: np.ndarray
    """Token ids of a store, [T]."""
    starts: np.ndarray
    """int64 [N, P]: where each of an example's P = 1 or 2 pieces begins."""
    lengths: np.ndarray
    """int64 [N, P]: tokens of each piece."""
    labels: np.ndarray
    """Classes, int64 [N]; of a regression, float32 [N]."""
    first: int = 0
    """How many of them are of the first split, where splits follow one another."""

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, chosen: np.ndarray, ids: np.ndarray, length: int) -> np.ndarray:
        """<s> A </s>, or <s> A </s></s> B </s>, and <pad> to a length.

        What does not fit is cut off at the end of the longer piece.

        Args:
            chosen: int64 [B].
            ids: RoBERTa's id of each token of the store.
            length: of a row, in tokens.
        Returns:
            int64 [B, length].
        """
        starts, everyone = self.starts[chosen], np.arange(len(chosen))
        kept = fitted(self.lengths[chosen], length - 2 * starts.shape[1])
        rows = np.full((len(chosen), length), Vocabulary.PAD, np.int64)
        place = np.zeros(len(chosen), np.int64)
        for number, (start, size) in enumerate(zip(starts.T, kept.T, strict=True)):
            rows[everyone, place] = Vocabulary.END if number else Vocabulary.START
            offset = np.arange(length) - place[:, None] - 1
            inside = (offset >= 0) & (offset < size[:, None])
            rows[inside] = ids[self.tokens[(start[:, None] + offset)[inside]]]
            rows[everyone, place + 1 + size] = Vocabulary.END
            place += size + 2
        return rows


def fitted(lengths: np.ndarray, room: int) -> np.ndarray:
    """The lengths, int64 [B, P], to which one or two pieces are cut to have `room` tokens at most
    together."""
    if lengths.shape[1] == 1:
        return np.minimum(lengths, room)
    first, second = lengths.T
    first = np.minimum(first, np.maximum(room - second, (room + 1) // 2))
    return np.stack([first, np.minimum(second, room - first)], axis=1)


def documents(store: Store, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Where the documents of a part begin, and their tokens without separators: both int64 [D]."""
    ends = np.flatnonzero(store.tokens(part) == store.meta["separator"])
    starts = np.concatenate([[0], ends[:-1] + 1])[: len(ends)]
    return starts, ends - starts
