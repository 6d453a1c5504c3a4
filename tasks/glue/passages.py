"""Two classification tasks made of text files: `topic` and `adjoin`.

topic: a passage; which of the top folders is its file from? Of the six folders with the most
validation text (of sympy: core, geometry, physics, polys, printing and solvers) each gives as many
passages as the smallest can.
adjoin: two passages; does the second follow the first in the same file (label 1), or has it been
exchanged for that of another such pair (label 0)? Half of the pairs each.

Passages are those of the token store that RoBERTa is pre-trained on: training passages are of its
training part, test passages of its validation part, whose files no model has been trained on. (Of
fewer than 20 files the last twentieth of each is the validation part.) Passages of one part do not
overlap, and all choices are fixed.
"""

import numpy as np

from co2.errors import require
from tasks.glue.examples import Examples, documents
from tasks.shared.corpus import Corpus
from tasks.shared.sampling import spread
from tasks.text.store import PARTS, Store

TOPICS = 6
_SHARE = 10
"""So many training passages count as much as one test passage, where topics are chosen."""


def topic(store: Store, corpus: Corpus, length: int) -> dict[str, Examples]:
    """Passages of `length` tokens and the number of their topic, by part.

    Raises:
        ConfigError: the corpus has no two folders with passages in both parts.
    """
    found = {part: _by_folder(store, corpus, part, length) for part in PARTS}
    train, val = found["train"], found["val"]
    enough = {name: min(len(train[name]), _SHARE * len(val[name])) for name in train if name in val}
    names = sorted(enough, key=lambda name: (-enough[name], name))[:TOPICS]
    hint = f"two of its folders must have text of {length} tokens for training and for validation"
    require(len(names) >= 2, corpus.key, corpus.value, f"{hint}; use glue.name=adjoin")
    made = {}
    for part, passages in found.items():
        number = min(len(passages[name]) for name in names)
        some = [passages[name][spread(len(passages[name]), number)] for name in sorted(names)]
        starts = np.concatenate(some)[:, None]
        labels = np.repeat(np.arange(len(names)), number)
        made[part] = Examples(store.tokens(part), starts, np.full_like(starts, length), labels)
    return made


def adjoin(store: Store, corpus: Corpus, length: int) -> dict[str, Examples]:
    """Pairs of passages of `length` tokens each, and whether they adjoin, by part.

    Raises:
        ConfigError: a part has less than four such pairs.
    """
    made = {}
    for part in PARTS:
        first, _ = _cut(*documents(store, part), 2 * length)
        hint = f"its {part} part has no four pairs of passages of {length} tokens; give more text"
        require(len(first) >= 4, corpus.key, corpus.value, hint)
        even, odd = first[0::2][: len(first) // 2], first[1::2]
        elsewhere = np.roll(odd, len(odd) // 2) + length
        pairs = np.stack([np.concatenate([even, odd]), np.concatenate([even + length, elsewhere])])
        labels = np.repeat([1, 0], len(odd))
        made[part] = Examples(store.tokens(part), pairs.T, np.full_like(pairs.T, length), labels)
    return made


def _by_folder(store: Store, corpus: Corpus, part: str, length: int) -> dict[str, np.ndarray]:
    """Where the passages of each top folder begin, int64 [N]; only folders that have any."""
    names = [name for name, _ in corpus.named_documents(part)]
    begins, lengths = documents(store, part)
    assert len(names) == len(begins), "every file is a document"
    starts, of = _cut(begins, lengths, length)
    folders = np.array([name.rpartition("/")[0].partition("/")[0] for name in names])[of]
    return {str(name): starts[folders == name] for name in np.unique(folders) if name}


def _cut(starts: np.ndarray, lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents into pieces of `size` tokens, without the rest: where each begins, and its
    document's number. Both int64 [N]."""
    counts = lengths // size
    of = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    return starts[of] + place * size, of
