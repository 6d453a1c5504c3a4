"""Labelled examples of one or two pieces of text, as rows of token ids."""

from dataclasses import dataclass

import numpy as np

from tasks.masking import Vocabulary
from tasks.store import Store


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

    def rows(self, chosen: np.ndarray, ids: np.ndarray, context: int) -> np.ndarray:
        """<s> A </s>, or <s> A </s></s> B </s>, and <pad> to the end.

        What does not fit is cut off at the end of the longer piece.

        Args:
            chosen: int64 [B].
            ids: RoBERTa's id of each token of the store.
        Returns:
            int64 [B, context].
        """
        rows = np.full((len(chosen), context), Vocabulary.PAD, np.int64)
        room = context - 2 * self.starts.shape[1]
        for row, starts, lengths in zip(
            rows, self.starts[chosen], self.lengths[chosen], strict=True
        ):
            place = 0
            for start, length in zip(starts, fitted(lengths, room), strict=True):
                row[place] = Vocabulary.END if place else Vocabulary.START
                row[place + 1 : place + 1 + length] = ids[self.tokens[start : start + length]]
                row[place + 1 + length] = Vocabulary.END
                place += length + 2
        return rows


def fitted(lengths: np.ndarray, room: int) -> list[int]:
    """The lengths of one or two pieces that together have `room` tokens at most."""
    if len(lengths) == 1:
        return [min(int(lengths[0]), room)]
    first, second = map(int, lengths)
    first = min(first, max(room - second, (room + 1) // 2))
    return [first, min(second, room - first)]


def documents(store: Store, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Where the documents of a part begin, and their tokens without separators: both int64 [D]."""
    ends = np.flatnonzero(store.tokens(part) == store.meta["separator"])
    starts = np.concatenate([[0], ends[:-1] + 1])[: len(ends)]
    return starts, ends - starts
