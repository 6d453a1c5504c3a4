"""A token store: a folder of token files that appears whole or not at all.

    train.bin, val.bin    token ids, uint16 (uint32 if the vocabulary has more than 65535 tokens)
    meta.json             written last: format, dtype, counts, checksums, origin of the tokens
    tokenizer.json        only where the store has a tokenizer of its own

A store is written aside and renamed, so a killed process leaves no half-written one behind.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from co2.atomic import refuse_others, to_disk, written_aside
from tasks.shared.progress import progress

FORMAT = 1
"""Version of the stores and of their content (split, tokenizer). Stores of others are not used."""

PARTS = ("train", "val")
SEPARATOR = "<|endoftext|>"
"""The token that ends every document."""

_WIDTHS = {"uint16": 2, "uint32": 4}
"""Bytes of a token id, by the type that meta.json names."""
_FILES = {"train.bin", "val.bin", "meta.json", "tokenizer.json"}


@dataclass(frozen=True)
class Store:
    """An open store whose files are sound."""

    folder: Path
    meta: dict[str, Any]
    """The content of meta.json. `Any`, because it is JSON."""

    def count(self, part: str) -> int:
        """Return the number of tokens in a part, "train" or "val"."""
        return int(self.meta["parts"][part]["tokens"])

    def tokens(self, part: str) -> np.ndarray:
        """Return the token ids of a part, [count], mapped from disk and read-only."""
        dtype = np.dtype(self.meta["dtype"])
        if self.count(part) == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.memmap(self.folder / f"{part}.bin", dtype, mode="r")


def open_store(folder: Path) -> Store | None:
    """Open the store in `folder`; None where there is none or it is damaged.

    Only meta.json is read. Damage is a missing file, or a size other than meta.json says.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if meta["dtype"] not in _WIDTHS:
            return None
        width = _WIDTHS[meta["dtype"]]
        for part in PARTS:
            size = (folder / f"{part}.bin").stat().st_size
            if size != meta["parts"][part]["tokens"] * width:
                return None
        whole = set(meta["files"]) <= _FILES and all((folder / n).exists() for n in meta["files"])
        return Store(folder, meta) if whole and meta["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def faults(folder: Path) -> Iterator[str]:
    """Yield what is wrong with a store, one line each. Unlike `open_store`, it reads all tokens."""
    for name in ("meta.json", "train.bin", "val.bin"):
        if not (folder / name).is_file():
            yield f"{folder / name}: is missing"
            return
    store = open_store(folder)
    if store is None:
        yield f"{folder}: meta.json does not fit the files beside it; prepare it again"
        return
    vocab_size = store.meta["vocab_size"]
    for part in PARTS:
        tokens, digest, largest = store.tokens(part), hashlib.sha256(), -1
        with progress(f"reading {part}.bin", len(tokens)) as advance:
            for start in range(0, len(tokens), 1 << 24):
                piece = tokens[start : start + (1 << 24)]
                digest.update(piece.data)
                largest = max(largest, int(piece.max()))
                advance(len(piece))
        if digest.hexdigest() != store.meta["parts"][part]["sha256"]:
            yield f"{folder / part}.bin: its checksum is not that of meta.json"
        if largest >= vocab_size:
            yield f"{folder / part}.bin: holds token {largest}, the vocabulary ends at {vocab_size}"


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """Return the narrowest type that a store uses for token ids below `vocab_size`."""
    return np.uint16 if vocab_size < 2**16 else np.uint32


def create(
    folder: Path,
    parts: Mapping[str, Iterable[np.ndarray]],
    vocab_size: int,
    separator: int,
    meta: Mapping[str, object],
    files: Mapping[str, str] | None = None,
) -> Store:
    """Write a store aside and move it to `folder`, where it replaces a damaged one.

    The caller holds `locked(folder)`. If another machine was first, its store is kept.

    Args:
        folder: place of the store.
        parts: chunks of token ids for "train" and "val", which are iterated once.
        vocab_size: size of the vocabulary; every id is below it.
        separator: the id that ends a document, by which documents are counted.
        meta: further entries of meta.json, values of JSON.
        files: further text files, by name.
    Returns:
        The new store, opened.
    Raises:
        OSError: the folder cannot be written, or holds other files.
    """
    refuse_strangers(folder)
    with written_aside(folder, lambda: open_store(folder) is not None) as aside:
        dtype = np.dtype(token_dtype(vocab_size))
        counts = {
            part: _write_tokens(aside / f"{part}.bin", parts[part], dtype, separator)
            for part in PARTS
        }
        for name, text in (files or {}).items():
            _write_text(aside / name, text)
        whole = {
            "format": FORMAT,
            "dtype": dtype.name,
            "vocab_size": vocab_size,
            "separator": separator,
            "parts": counts,
            "files": sorted(files or {}),
            **meta,
        }
        _write_text(aside / "meta.json", json.dumps(whole, indent=2) + "\n")
    store = open_store(folder)
    assert store is not None, f"{folder} was damaged as soon as it was written"
    return store


def refuse_strangers(folder: Path) -> None:
    """Raise `FileExistsError` if `folder` holds a file that does not belong to a store."""
    refuse_others(folder, _FILES)


def _write_tokens(
    path: Path, chunks: Iterable[np.ndarray], dtype: np.dtype, separator: int
) -> dict[str, int | str]:
    digest, tokens, documents = hashlib.sha256(), 0, 0
    with path.open("wb") as file:
        for chunk in chunks:
            data = np.ascontiguousarray(chunk, dtype).data
            file.write(data)
            digest.update(data)
            tokens += len(chunk)
            documents += int(np.count_nonzero(chunk == separator))
        to_disk(file)
    return {"tokens": tokens, "documents": documents, "sha256": digest.hexdigest()}


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        to_disk(file)
