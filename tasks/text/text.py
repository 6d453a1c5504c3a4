"""Text as windows of token ids: tokenizer, cache, memory maps.

A corpus of text files is tokenized once, by a byte-level BPE learned from its training part, and
kept under `data.root/text/` as a token store named by the sha256 of the corpus. Later runs read
that store only. For public data sets, `python -m tasks.prepare` makes token stores.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from co2.atomic import locked, require_writable
from co2.config import DataConfig
from co2.errors import ConfigError, require
from co2.program import python
from tasks.shared.corpus import Corpus, embedded_corpus, user_corpus
from tasks.shared.progress import progress
from tasks.text.store import (
    FORMAT,
    PARTS,
    SEPARATOR,
    Store,
    create,
    open_store,
    token_dtype,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PIECE = 1 << 18
"""Largest number of characters that are encoded at once. A longer text is divided after a line,
which bounds memory and lets all cores work on a single file."""


@dataclass(frozen=True)
class Window:
    """How much text one sample needs."""

    key: str
    """Key of the configuration that sets it, such as gpt2.context, and its value, for errors."""
    context: int
    length: int
    """Number of tokens of text in one window."""

    def require(self, num_tokens: int, part: str, key: str, value: object) -> None:
        """Raise `ConfigError` unless `num_tokens` of "train" or "val" fill one window."""
        name = {"train": "training", "val": "validation"}[part]
        hint = (
            f"the {name} part holds {num_tokens} tokens, one window of {self.key}={self.context} "
            f"needs {self.length}; give more text or a smaller {self.key}"
        )
        require(num_tokens >= self.length, key, value, hint)


def opened(data: DataConfig, key: str, corpus: str, vocab_size: int, window: Window) -> Store:
    """Open the token store that a task trains on.

    Args:
        data: where `data.path` is set, it replaces the corpus.
        key: key of the configuration that chose the corpus, for errors.
        corpus: "embedded", or the name of a data set of `tasks.prepare`.
        vocab_size: as for `prepared`; a public data set has a tokenizer of its own.
        window: window of the model; each part must hold one.
    Raises:
        ConfigError: the text is missing, too short or cannot be used.
    """
    root = Path(data.root)
    if data.path is not None:
        return prepared(user_corpus(data.path), vocab_size, window, root)
    if corpus == "embedded":
        return prepared(embedded_corpus(key), vocab_size, window, root)
    store = open_store(root / corpus)
    if store is None:
        command = f"{python()} -m tasks.prepare {corpus} --root {root}"
        hint = f"no sound {root / corpus}; make it: {command}"
        raise ConfigError(key, corpus, hint)
    for part in PARTS:
        window.require(store.count(part), part, key, corpus)
    return store


def prepared(corpus: Corpus, vocab_size: int, window: Window, root: Path) -> Store:
    """Return the token store of a corpus from the cache, or make it.

    Args:
        corpus: text files.
        vocab_size: largest size of the vocabulary, with the 256 bytes and the separator.
        window: window of the model; each part must hold one.
        root: folder of the caches, `data.root`.
    Raises:
        ConfigError: there is no text or too little of it (then nothing has been written), or
            `root` cannot be written.
    """
    folder = root / "text" / f"{corpus.name}-{corpus.sha256[:16]}-{vocab_size}-v{FORMAT}"
    store = open_store(folder)
    if store is None:
        require_writable("data.root", root, folder)
        corpus.check()
        with locked(folder):
            # Another process may have made it while this one waited.
            store = open_store(folder) or _prepare(corpus, vocab_size, window, folder, root)
    for part in PARTS:
        window.require(store.count(part), part, corpus.key, corpus.value)
    return store


def described(store: Store, name: str) -> dict[str, object]:
    """Return what identifies the tokens of a store, for `Task.fingerprint`."""
    meta, parts = store.meta, store.meta["parts"]
    return {
        "data": name,
        # Of the text files; for public data sets, whose text is not kept, of the training tokens.
        "sha256": meta.get("sha256", parts["train"]["sha256"]),
        "num_files": meta.get("num_files"),
        "num_documents": {part: parts[part]["documents"] for part in parts},
        "num_tokens": {part: parts[part]["tokens"] for part in parts},
        "tokens_sha256": {part: parts[part]["sha256"] for part in parts},
        "tokenizer": meta.get("tokenizer", f"byte-level BPE, {meta['vocab_size']}"),
    }


def num_windows(num_tokens: int, stride: int, overlap: int = 1) -> int:
    """Return the number of windows that `num_tokens` fill; see `windows`."""
    return (num_tokens - overlap) // stride


def windows(tokens: np.ndarray, indices: np.ndarray, stride: int, overlap: int = 1) -> Tensor:
    """Return windows of stride + overlap tokens; a window begins at the token index * stride.

    With an overlap of 1, for next-token prediction, neither inputs nor targets overlap: the last
    target of a window is the first input of the next, so every token but the very first is
    predicted exactly once.

    Args:
        tokens: token ids, [count].
        indices: indices of the windows, int64 [B].
        stride: tokens from the beginning of a window to that of the next.
        overlap: tokens that a window shares with the next.
    Returns:
        int64 [len(indices), stride + overlap]; with an overlap of 1, inputs are [:, :-1] and
        targets [:, 1:].
    """
    places = indices[:, None] * stride + np.arange(stride + overlap)
    return torch.from_numpy(np.asarray(tokens)[places].astype(np.int64))


def unigram_entropy(tokens: np.ndarray) -> float:
    """Return the entropy of the tokens' frequencies in nats: the loss of the best model without
    context."""
    counts = np.bincount(tokens).astype(np.float64)
    shares = counts[counts > 0] / len(tokens)
    return float(-(shares * np.log(shares)).sum())


def token_bytes(store: Store) -> np.ndarray | None:
    """Return the number of bytes of text that each token stands for, int64 [vocabulary].

    A byte-level BPE writes every byte of a token as one character. The separator and other special
    tokens stand for no text. None where the store has no tokenizer of its own.
    """
    path = store.folder / "tokenizer.json"
    if not path.exists():
        return None
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    lengths = np.zeros(store.meta["vocab_size"], np.int64)
    for token, number in tokenizer["model"]["vocab"].items():
        lengths[number] = len(token)
    lengths[[added["id"] for added in tokenizer["added_tokens"]]] = 0
    return lengths


def learn_tokenizer(texts: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Learn a byte-level BPE, which encodes any text and decodes it to itself. Deterministic.

    From a small corpus it learns fewer than `vocab_size` tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encoded(
    documents: Iterable[str],
    tokenizer: "Tokenizer",
    dtype: type[np.unsignedinteger],
    separator: str = SEPARATOR,
) -> Iterator[np.ndarray]:
    """Yield the token ids of documents in chunks, with the separator after each document.

    Where a document contains the text of the separator, it is encoded as ordinary tokens.
    """
    tokenizer.encode_special_tokens = True
    end = [separator_id(tokenizer, separator)]
    for batch in _batches(documents):
        texts = [text for text, _ in batch]
        codes = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for code, (_, last) in zip(codes, batch, strict=True):
            yield np.array(code.ids + end if last else code.ids, dtype)


def separator_id(tokenizer: "Tokenizer", separator: str = SEPARATOR) -> int:
    """Return the id of the separator, which the tokenizer must have."""
    found = tokenizer.token_to_id(separator)
    assert found is not None, f"the tokenizer has no {separator}"
    return found


def pieces(text: str, size: int = _PIECE) -> Iterator[str]:
    """Divide a text into pieces of at most `size` characters, after line ends if possible."""
    start = 0
    while len(text) - start > size:
        end = text.rfind("\n", start, start + size) + 1
        end = end if end > start else start + size
        yield text[start:end]
        start = end
    yield text[start:]


def _batches(documents: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Yield batches of pieces, large enough to occupy all cores. With each piece comes whether it
    is the last of its document."""
    batch: list[tuple[str, bool]] = []
    held = 0
    for text in documents:
        cut = list(pieces(text))
        for number, piece in enumerate(cut, start=1):
            batch.append((piece, number == len(cut)))
            held += len(piece)
            if held >= 8 * _PIECE:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch


def _prepare(corpus: Corpus, vocab_size: int, window: Window, folder: Path, root: Path) -> Store:
    """Learn a vocabulary, encode the corpus, check that it is long enough, and only then write."""
    size = f"{corpus.value} ({corpus.num_bytes / 1e6:.1f} MB), once"
    with progress(f"learning a vocabulary from {size}", corpus.num_bytes) as advance:
        train = chain.from_iterable(pieces(text) for text in corpus.documents("train"))
        tokenizer = learn_tokenizer(_reported(train, advance), vocab_size)
    dtype = token_dtype(vocab_size)
    with progress(f"encoding {size}", corpus.num_bytes) as advance:
        chunks = {}
        for part in reversed(PARTS):  # the smaller part first, because it is more often too short
            texts = _reported(corpus.documents(part), advance)
            chunks[part] = _checked(encoded(texts, tokenizer, dtype), window, part, corpus)
        try:
            return create(
                folder,
                chunks,
                vocab_size,
                separator_id(tokenizer),
                {"sha256": corpus.sha256, "num_files": len(corpus.files)},
                {"tokenizer.json": tokenizer.to_str(pretty=True)},
            )
        except OSError as error:
            hint = f"cannot write {error.filename or folder} ({error.strerror}); choose another"
            raise ConfigError("data.root", root, hint) from None


def _checked(
    chunks: Iterator[np.ndarray], window: Window, part: str, corpus: Corpus
) -> Iterator[np.ndarray]:
    """Return the same chunks, after checking that they fill one window."""
    ahead: list[np.ndarray] = []
    held = 0
    while held < window.length and (chunk := next(chunks, None)) is not None:
        ahead.append(chunk)
        held += len(chunk)
    window.require(held, part, corpus.key, corpus.value)
    return chain(ahead, chunks)


def _reported(texts: Iterable[str], advance: Callable[[int], None]) -> Iterator[str]:
    for text in texts:
        yield text
        advance(len(text))
