"""A token store: a folder of token files that appears whole or not at all.

    train.bin, val.bin    token ids, uint16 (uint32 from a vocabulary of 65536 on), nothing else
    meta.json             written last: format, dtype, counts, checksums, where the tokens are from
    tokenizer.json        where the store has its own

A store is written aside and renamed, so a kill leaves no half of one behind.
"""

import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from tasks.progress import progress

FORMAT = 1
"""Version of the stores and of their content (split, tokenizer). A new one makes caches void."""

PARTS = ("train", "val")
SEPARATOR = "<|endoftext|>"
"""The token that ends every document."""

_FILES = {"train.bin", "val.bin", "meta.json", "tokenizer.json"}


@dataclass(frozen=True)
class Store:
    """A sound store, opened."""

    folder: Path
    meta: dict[str, Any]
    """The content of meta.json, hence `Any`."""

    def count(self, part: str) -> int:
        """Tokens of a part."""
        return int(self.meta["parts"][part]["tokens"])

    def tokens(self, part: str) -> np.ndarray:
        """Token ids of a part, [count], mapped from disk; read-only."""
        dtype = np.dtype(self.meta["dtype"])
        if self.count(part) == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.memmap(self.folder / f"{part}.bin", dtype, mode="r")


def open_store(folder: Path) -> Store | None:
    """The store in `folder`, or None where there is none or it is damaged.

    Reads meta.json only; damage is a file missing or of another size than meta.json says.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text())
        width = np.dtype(meta["dtype"]).itemsize
        for part in PARTS:
            size = (folder / f"{part}.bin").stat().st_size
            if size != meta["parts"][part]["tokens"] * width:
                return None
        whole = all((folder / name).exists() for name in meta["files"])
        return Store(folder, meta) if whole and meta["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def faults(folder: Path) -> Iterator[str]:
    """What is wrong with a store, one line each; unlike `open_store`, reads every token."""
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
    """The narrowest type that a store uses for a vocabulary."""
    return np.uint16 if vocab_size < 2**16 else np.uint32


def locked(folder: Path) -> AbstractContextManager[object]:
    """A lock that lets one process of this machine at a time make `folder`.

    It saves work, not correctness: the rename makes two writers safe, on two machines too. It lies
    in the system's temporary folder, where file locks work and a refused run leaves no trace.
    """
    from filelock import FileLock

    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    return FileLock(Path(tempfile.gettempdir()) / f"tokens-{os.getuid()}-{name}.lock")


def create(
    folder: Path,
    parts: Mapping[str, Iterable[np.ndarray]],
    vocab_size: int,
    separator: int,
    meta: Mapping[str, Any],
    files: Mapping[str, str] | None = None,
) -> Store:
    """Write a store aside and move it to `folder`, in place of a damaged one.

    The caller holds `locked(folder)`. If another machine was first, its store stays.

    Args:
        parts: chunks of token ids for "train" and "val", consumed once.
        vocab_size: every id is below it.
        separator: the id that ends a document; documents are counted by it.
        meta: more entries for meta.json.
        files: more text files, by name.
    Raises:
        OSError: the folder cannot be written, or holds other files.
    """
    refuse_strangers(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    mine = f".{folder.name}.{socket.gethostname()}"
    for stale in folder.parent.glob(f"{mine}.*"):  # of a process that was killed
        _remove(stale)
    aside = folder.parent / f"{mine}.{os.getpid()}"
    aside.mkdir()
    try:
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
        _move(aside, folder)
    finally:
        if aside.exists():
            _remove(aside)
    store = open_store(folder)
    assert store is not None, f"{folder} was damaged as soon as it was written"
    return store


def refuse_strangers(folder: Path) -> None:
    """Raise FileExistsError if `folder` holds anything that no store holds."""
    strange = folder.exists() and (
        not folder.is_dir() or any(entry.name not in _FILES for entry in folder.iterdir())
    )
    if strange:
        raise FileExistsError(17, "is in the way: it holds files that are not ours", str(folder))


def _write_tokens(
    path: Path, chunks: Iterable[np.ndarray], dtype: np.dtype, separator: int
) -> dict[str, Any]:
    digest, tokens, documents = hashlib.sha256(), 0, 0
    with path.open("wb") as file:
        for chunk in chunks:
            data = np.ascontiguousarray(chunk, dtype).data
            file.write(data)
            digest.update(data)
            tokens += len(chunk)
            documents += int(np.count_nonzero(chunk == separator))
        _to_disk(file)
    return {"tokens": tokens, "documents": documents, "sha256": digest.hexdigest()}


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        _to_disk(file)


def _to_disk(file: IO[bytes] | IO[str]) -> None:
    """Write the data to the disk now, so that a later rename cannot arrive there before them."""
    file.flush()
    os.fsync(file.fileno())


def _move(aside: Path, folder: Path) -> None:
    for _ in range(10):
        try:
            os.rename(aside, folder)
            return
        except OSError:
            if not folder.exists():
                raise
        if open_store(folder) is not None:
            return
        damaged = aside.with_name(aside.name + ".damaged")
        try:
            os.rename(folder, damaged)
        except FileNotFoundError:  # another machine took it away
            continue
        _remove(damaged)
    raise FileExistsError(17, "is replaced by others again and again", str(folder))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
