"""Documents of the Hugging Face hub or of a folder as a token store, for openwebtext and wikibooks.

Documents are tokenized in shards into `<root>/<name>.shards/`. Each shard is a folder that is
renamed into place when it is complete, and a later run continues at the first that is missing. At
the end the shards are joined into the token store `<root>/<name>/` and removed.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from co2.atomic import locked, require_writable
from co2.errors import ConfigError, require
from tasks.prepare.samples import broken
from tasks.shared.corpus import user_corpus
from tasks.shared.progress import progress
from tasks.text.store import (
    PARTS,
    Store,
    create,
    faults,
    open_store,
    refuse_strangers,
    token_dtype,
)
from tasks.text.text import encoded, separator_id

if TYPE_CHECKING:
    from datasets import Dataset
    from tokenizers import Tokenizer

_READ = 1000
"""Number of rows that are read at once."""


@dataclass(frozen=True)
class Words:
    """Which tokenizer a data set needs."""

    owner: str
    """Name of the model whose tokenizer it is, for errors."""
    hub_name: str
    """Name of the model on the hub."""
    separator: str
    """The token that ends every document."""
    ids: Mapping[str, int] = field(default_factory=dict)
    """Special tokens and the ids that they must have; -1 is the last id."""


class Documents:
    """The documents of several data sets, one data set after the other.

    Args:
        sources: data sets with a column "text", and the number of rows that make a document.
        keep_blank: whether `texts` also yields documents without text.
    """

    def __init__(self, sources: "Sequence[tuple[Dataset, int]]", keep_blank: bool) -> None:
        self.sources, self.keep_blank = sources, keep_blank
        self._lengths = [-(-len(data) // rows) for data, rows in sources]

    def __len__(self) -> int:
        return sum(self._lengths)

    def texts(self, chosen: Sequence[int], advance: Callable[[int], None]) -> Iterator[str]:
        """Yield the documents with the indices `chosen`, which are ascending. `advance` is called
        with numbers of documents read."""
        first = 0
        for (data, rows), length in zip(self.sources, self._lengths, strict=True):
            own = [index - first for index in chosen if 0 <= index - first < length]
            first += length
            step = max(1, _READ // rows)
            for start in range(0, len(own), step):
                some = own[start : start + step]
                spans = [range(n * rows, min((n + 1) * rows, len(data))) for n in some]
                found = iter(data[list(chain.from_iterable(spans))]["text"])
                for span in spans:
                    text = "\n".join(row or "" for row in islice(found, len(span)))
                    if self.keep_blank or text.strip():
                        yield text
                advance(len(some))


def add_arguments(parser: argparse.ArgumentParser, words: Words) -> None:
    """Add the options that both data sets have."""
    parser.add_argument(
        "--tokenizer",
        default=words.hub_name,
        help=f"a tokenizer.json or a model of the hub (default: {words.hub_name})",
    )
    parser.add_argument(
        "--shards", type=int, default=80, help="steps it can go on from (default: 80)"
    )
    parser.add_argument(
        "--val-share",
        type=float,
        default=0.0005,
        help="share of the documents that validate (default: 0.0005)",
    )


def prepare(
    options: argparse.Namespace,
    words: Words,
    sources: Mapping[str, object],
    load: Callable[[], Documents],
) -> str:
    """Make `<root>/<name>` unless it exists. Returns a line that describes it.

    Args:
        options: the options of the command line, with those of `add_arguments`.
        words: which tokenizer the data set needs.
        sources: the options that chose the documents, by name. A folder that was begun with other
            values is refused.
        load: loads the documents; it is called only where they are needed.
    Raises:
        ConfigError: a value cannot be used, or other files are in the way.
    """
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.set_verbosity_error()  # otherwise it prints a line for each of many retries
    share, tokenizer = options.val_share, options.tokenizer
    require(options.shards >= 1, "--shards", options.shards, "must be 1 or more")
    require(0 < share < 1, "--val-share", share, "must be between 0 and 1")
    final = Path(options.root) / options.name
    try:
        with locked(final):
            store = open_store(final)
            if store is not None:
                given = {**sources, "val_share": share, "tokenizer": tokenizer}
                _refuse_other(store.meta, final, given)
            else:
                refuse_strangers(final)
                store = _make(final, options, words, sources, load)
    except OSError as error:
        what = f"{error.filename or final}: {error.strerror or error}"
        hint = f"{what}; make room or choose another"
        raise ConfigError("--root", options.root, hint) from None
    counts = ", ".join(f"{store.count(part):,} {part}" for part in PARTS)
    return f"{store.folder}: {counts} tokens"


def _make(
    final: Path,
    options: argparse.Namespace,
    words: Words,
    sources: Mapping[str, object],
    load: Callable[[], Documents],
) -> Store:
    require_writable("--root", options.root, final)
    loaded, documents = load_tokenizer(options.tokenizer, words), load()
    num_shards, val_share = options.shards, options.val_share
    hint = f"the data hold {len(documents)} documents; use fewer shards"
    require(num_shards <= len(documents), "--shards", num_shards, hint)
    plan = {
        **sources,
        "val_share": val_share,
        "num_shards": num_shards,
        "num_documents": len(documents),
        "tokenizer": options.tokenizer,
        "tokenizer_sha256": hashlib.sha256(loaded.to_str().encode()).hexdigest(),
    }
    work = final.with_name(final.name + ".shards")
    _begin(work, plan)

    shards = []
    with progress(f"tokenizing {len(documents):,} documents", len(documents)) as advance:
        for number in range(num_shards):
            folder = work / f"{number:05d}"
            first, end = (len(documents) * edge // num_shards for edge in (number, number + 1))
            shard = open_store(folder)
            if shard is None:
                rows = range(first, end)
                shard = _shard(folder, documents, rows, loaded, words, val_share, advance)
                if not sys.stderr.isatty():
                    print(f"shard {number + 1} of {num_shards}", file=sys.stderr, flush=True)
            else:
                advance(end - first)
            shards.append(shard)

    tokens = sum(shard.count(part) for shard in shards for part in PARTS)
    with progress(f"joining {num_shards} shards", tokens) as advance:
        parts = {part: _joined(shards, part, advance) for part in PARTS}
        files = {"tokenizer.json": loaded.to_str(pretty=True)}
        end = separator_id(loaded, words.separator)
        store = create(final, parts, vocab_size(options.tokenizer, loaded), end, plan, files)
    shutil.rmtree(work, ignore_errors=True)
    return store


def load_tokenizer(name: str, words: Words) -> "Tokenizer":
    """Load a tokenizer from a tokenizer.json, or that of a model on the hub.

    This does not use transformers, whose GPT-2 tokenizer is empty without the network, and without
    an error.

    Args:
        name: path of a file, or name of a model.
        words: what the tokenizer must fit.
    Raises:
        ConfigError: it cannot be loaded, does not decode text to itself, or lacks a special token
            or gives it another id.
    """
    from huggingface_hub import hf_hub_download
    from tokenizers import Tokenizer

    key, take = "--tokenizer", f"take {words.owner}'s"
    missing = name.endswith(".json") and not Path(name).is_file()
    require(not missing, key, name, f"no such file; {take}, from {words.hub_name} on the hub")
    try:
        file = name if Path(name).is_file() else hf_hub_download(name, "tokenizer.json")
        tokenizer = Tokenizer.from_file(file)
    except Exception as error:  # the hub's client and the parser raise errors of many types
        what = f"cannot be loaded ({brief(error)})"
        hint = f"{what}; without the network give the tokenizer.json of {words.hub_name}"
        raise ConfigError(key, name, hint) from None
    for token in (words.separator, *words.ids):
        require(tokenizer.token_to_id(token) is not None, key, name, f"has no {token}; {take}")
    size = vocab_size(name, tokenizer)
    for token, wanted in words.ids.items():
        found, wanted = tokenizer.token_to_id(token), wanted % size
        require(found == wanted, key, name, f"has {token} as {found}, not {wanted}; {take}")
    probe = "Ünïcode, \tspaces\n and 數\x07"
    kept = tokenizer.decode(tokenizer.encode(probe, add_special_tokens=False).ids) == probe
    require(kept, key, name, f"does not give text back as it was; {take}")
    return tokenizer


def vocab_size(name: str, tokenizer: "Tokenizer") -> int:
    """Return the size of the vocabulary of a model with this tokenizer.

    A model may know more tokens than its tokenizer, as one does that was trained on a short text.
    Then its config.json tells how many, where it lies beside the tokenizer's file.

    Args:
        name: as for `load_tokenizer`.
        tokenizer: what that has loaded.
    Raises:
        ConfigError: that config.json cannot be read.
    """
    size, path = tokenizer.get_vocab_size(), Path(name).with_name("config.json")
    if not (Path(name).is_file() and path.is_file()):
        return size
    try:
        return max(size, int(json.loads(path.read_text()).get("vocab_size", 0)))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        hint = f"{path} cannot be read ({brief(error)}); mend it, or move the tokenizer elsewhere"
        raise ConfigError("--tokenizer", name, hint) from None


def load_rows(key: str, source: str) -> "Dataset":
    """Load all rows of a folder, or of a data set on the hub: NAME, or NAME:CONFIGURATION.

    Args:
        key: the option that chose it, for errors.
        source: the folder or the name.
    Raises:
        ConfigError: it cannot be loaded, has no row, no split "train" or no column "text".
    """
    import datasets

    folder = Path(source)
    try:
        saved = any((folder / name).exists() for name in ("state.json", "dataset_dict.json"))
        if saved:  # written by save_to_disk
            data = datasets.load_from_disk(source)
        else:
            name, _, configuration = (source, "", "") if folder.exists() else source.partition(":")
            data = datasets.load_dataset(name, configuration or None, split="train")
    except Exception as error:  # the hub's clients raise errors of many types
        hint = (
            f"cannot be loaded ({brief(error)}); check the name and the network, or give a "
            "folder of parquet or JSON lines files"
        )
        raise ConfigError(key, source, hint) from None
    if isinstance(data, datasets.DatasetDict):
        require("train" in data, key, source, f"has no split train, only {', '.join(data)}")
        data = data["train"]
    columns = data.column_names
    require("text" in columns, key, source, f'has no column "text", only {", ".join(columns)}')
    require(len(data) > 0, key, source, "holds no document")
    return data


def unreadable(path: Path) -> Iterator[str]:
    """Yield a line for each fault in a token store, or for each text that cannot be read in the
    user's own file or folder of texts."""
    if any((path / f"{part}.bin").exists() for part in PARTS):
        yield from faults(path)
        return
    corpus = user_corpus(str(path))

    def fault(number: int) -> str | None:
        try:
            corpus.text(corpus.files[number])
        except ConfigError as error:
            return f"{path}: {error.hint}"
        return None

    yield from broken("reading texts", len(corpus.files), fault)


def validates(index: int, share: float) -> bool:
    """Return whether the document with this index is for validation. The choice is fixed, and on
    average `share` of the documents are chosen."""
    digest = hashlib.blake2b(index.to_bytes(8, "big"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _begin(work: Path, plan: dict[str, object]) -> None:
    """Make the folder of the shards, or check that those in it belong to the same plan."""
    path = work / "plan.json"
    if path.exists():
        try:
            begun = json.loads(path.read_text())
        except ValueError:
            begun = {}
        _refuse_other(begun, work, plan)
        return
    work.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(plan, indent=2))
    os.replace(aside, path)


def _refuse_other(begun: Mapping[str, object], folder: Path, plan: Mapping[str, object]) -> None:
    """Raise `ConfigError` if `folder` was begun or made with other values than those of `plan`."""
    options = {"num_shards": "--shards", "num_documents": "--source"}
    for name, value in plan.items():
        if begun.get(name) != value:
            own = "--tokenizer" if "tokenizer" in name else "--" + name.replace("_", "-")
            key = options.get(name, own)
            hint = f"{folder} was made with {name}={begun.get(name)}; keep to it or delete it"
            raise ConfigError(key, value, hint)


def _shard(
    folder: Path,
    documents: Documents,
    indices: range,
    loaded: "Tokenizer",
    words: Words,
    val_share: float,
    advance: Callable[[int], None],
) -> Store:
    chosen: dict[str, list[int]] = {part: [] for part in PARTS}
    for index in indices:
        chosen["val" if validates(index, val_share) else "train"].append(index)
    size = loaded.get_vocab_size()

    def tokens(part: str) -> Iterator[np.ndarray]:
        texts = documents.texts(chosen[part], advance)
        return encoded(texts, loaded, token_dtype(size), words.separator)

    parts = {part: tokens(part) for part in PARTS}
    meta = {"rows": [indices.start, indices.stop]}
    return create(folder, parts, size, separator_id(loaded, words.separator), meta)


def _joined(
    shards: list[Store], part: str, advance: Callable[[int], None], size: int = 1 << 24
) -> Iterator[np.ndarray]:
    for shard in shards:
        tokens = shard.tokens(part)
        for start in range(0, len(tokens), size):
            chunk = tokens[start : start + size]
            yield chunk
            advance(len(chunk))


def brief(error: Exception) -> str:
    """Return the first line of an error, shortened to fit into one line."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 120 else text[:117] + "..."
