"""OpenWebText as tokens, for gpt2.

Documents are tokenized shard by shard into `<root>/openwebtext.shards/`, one folder a shard, each
renamed into place when it is whole; a later run goes on at the first that is missing. At the end
the shards are joined into the token store `<root>/openwebtext/` and removed.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from co2.errors import ConfigError, require
from tasks.progress import progress
from tasks.store import (
    PARTS,
    SEPARATOR,
    Store,
    create,
    faults,
    locked,
    open_store,
    refuse_strangers,
    token_dtype,
)
from tasks.text import encoded, separator_id

if TYPE_CHECKING:
    from datasets import Dataset
    from tokenizers import Tokenizer

HUB_NAME = "Skylion007/openwebtext"
HUB_TOKENIZER = "openai-community/gpt2"
_READ = 1000
"""Documents read at once."""

HELP = """\
OpenWebText for task=gpt2 gpt2.corpus=openwebtext.

Downloads the documents, tokenizes them with GPT-2's vocabulary (50257) and writes
  <root>/openwebtext/{train.bin,val.bin,meta.json,tokenizer.json}
About 8 million documents and 9 billion tokens: 18 GB at the end, some 90 GB on the way (the
download included), hours on a few cores. Stop it whenever you like; the same command goes on
where it stopped.

Without the network:
  --source FOLDER --tokenizer FILE, where FOLDER holds parquet or JSON lines files with a column
  "text", or what datasets' save_to_disk wrote, and FILE is GPT-2's tokenizer.json"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its own options."""
    parser.add_argument(
        "--source",
        default=HUB_NAME,
        help=f'a folder or a data set of the hub, with a column "text" (default: {HUB_NAME})',
    )
    parser.add_argument(
        "--tokenizer",
        default=HUB_TOKENIZER,
        help=f"a tokenizer.json or a model of the hub (default: {HUB_TOKENIZER})",
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


def run(options: argparse.Namespace) -> str:
    """The command line's work; returns what to say at the end."""
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.set_verbosity_error()  # or it announces each of many retries
    store = prepare(
        Path(options.root),
        source=options.source,
        tokenizer=options.tokenizer,
        num_shards=options.shards,
        val_share=options.val_share,
    )
    counts = ", ".join(f"{store.count(part):,} {part}" for part in PARTS)
    return f"{store.folder}: {counts} tokens; train with: task=gpt2 gpt2.corpus=openwebtext"


def check(path: Path) -> Iterator[str]:
    """See `DataSet.check`."""
    return faults(path)


def prepare(
    root: Path,
    source: str = HUB_NAME,
    tokenizer: str = HUB_TOKENIZER,
    num_shards: int = 80,
    val_share: float = 0.0005,
) -> Store:
    """Make `root/openwebtext`, or find it made.

    Args:
        source: a folder, or a data set of the Hugging Face hub, with a column "text".
        tokenizer: a tokenizer.json, or a model of the hub.
        num_shards: steps in which it is done, and from which it can go on.
        val_share: share of the documents that validate, chosen by the hash of their index.
    Raises:
        ConfigError: a value that does not work, or other data in the way.
    """
    require(num_shards >= 1, "--shards", num_shards, "must be 1 or more")
    require(0 < val_share < 1, "--val-share", val_share, "must be between 0 and 1")
    final = root / "openwebtext"
    try:
        with locked(final):
            done = open_store(final)
            if done is not None:
                given = {"source": source, "val_share": val_share, "tokenizer": tokenizer}
                _refuse_other(done.meta, final, given)
                return done
            refuse_strangers(final)
            return _make(final, source, tokenizer, num_shards, val_share)
    except OSError as error:
        what = f"{error.filename or final}: {error.strerror or error}"
        raise ConfigError("--root", root, f"{what}; make room or choose another") from None


def _make(final: Path, source: str, tokenizer: str, num_shards: int, val_share: float) -> Store:
    words = load_tokenizer(tokenizer)
    data = load_documents(source)
    mend = f"the data hold {len(data)} documents; use fewer shards"
    require(num_shards <= len(data), "--shards", num_shards, mend)
    plan = {
        "source": source,
        "val_share": val_share,
        "num_shards": num_shards,
        "num_documents": len(data),
        "tokenizer": tokenizer,
        "tokenizer_sha256": hashlib.sha256(words.to_str().encode()).hexdigest(),
    }
    work = final.with_name(final.name + ".shards")
    _begin(work, plan)

    shards = []
    with progress(f"tokenizing {len(data):,} documents", len(data)) as advance:
        for number in range(num_shards):
            folder = work / f"{number:05d}"
            first, end = (len(data) * edge // num_shards for edge in (number, number + 1))
            shard = open_store(folder)
            if shard is None:
                shard = _shard(folder, data, range(first, end), words, val_share, advance)
                if not sys.stderr.isatty():
                    print(f"shard {number + 1} of {num_shards}", file=sys.stderr, flush=True)
            else:
                advance(end - first)
            shards.append(shard)

    tokens = sum(shard.count(part) for shard in shards for part in PARTS)
    with progress(f"joining {num_shards} shards", tokens) as advance:
        parts = {part: _joined(shards, part, advance) for part in PARTS}
        files = {"tokenizer.json": words.to_str(pretty=True)}
        store = create(final, parts, words.get_vocab_size(), separator_id(words), plan, files)
    shutil.rmtree(work, ignore_errors=True)
    return store


def load_tokenizer(name: str) -> "Tokenizer":
    """A tokenizer.json, or that of a model on the hub.

    Not by way of transformers: without the network its GPT-2 tokenizer comes empty, silently.

    Raises:
        ConfigError: it cannot be had, loses text, or lacks the separator.
    """
    from huggingface_hub import hf_hub_download
    from tokenizers import Tokenizer

    try:
        file = name if Path(name).is_file() else hf_hub_download(name, "tokenizer.json")
        tokenizer = Tokenizer.from_file(file)
    except Exception as error:  # the hub's client and the parser raise many kinds
        mend = f"cannot be loaded ({_brief(error)}); without the network give a tokenizer.json"
        raise ConfigError("--tokenizer", name, mend) from None
    found = tokenizer.token_to_id(SEPARATOR) is not None
    require(found, "--tokenizer", name, f"has no {SEPARATOR}; take GPT-2's")
    probe = "Ünïcode, \tspaces\n and 數\x07"
    kept = tokenizer.decode(tokenizer.encode(probe, add_special_tokens=False).ids) == probe
    require(kept, "--tokenizer", name, "does not give text back as it was; take GPT-2's")
    return tokenizer


def load_documents(source: str) -> "Dataset":
    """All documents of a folder or of a data set on the hub, in their order.

    Raises:
        ConfigError: it cannot be had, or has no column "text".
    """
    import datasets

    key, folder = "--source", Path(source)
    try:
        saved = any((folder / name).exists() for name in ("state.json", "dataset_dict.json"))
        if saved:  # by save_to_disk
            data = datasets.load_from_disk(source)
        else:
            data = datasets.load_dataset(source, split="train")
    except Exception as error:  # the hub's clients raise many kinds
        mend = (
            f"cannot be loaded ({_brief(error)}); check the name and the network, or give a "
            "folder of parquet or JSON lines files"
        )
        raise ConfigError(key, source, mend) from None
    if isinstance(data, datasets.DatasetDict):
        require("train" in data, key, source, f"has no split train, only {', '.join(data)}")
        data = data["train"]
    columns = data.column_names
    require("text" in columns, key, source, f'has no column "text", only {", ".join(columns)}')
    require(len(data) > 0, key, source, "holds no document")
    return data


def validates(index: int, share: float) -> bool:
    """Whether the document with this index validates: a fixed coin, `share` of them on average."""
    digest = hashlib.blake2b(index.to_bytes(8, "big"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _begin(work: Path, plan: dict[str, Any]) -> None:
    """Make the folder of the shards, or make sure that those in it belong to the same plan."""
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


def _refuse_other(begun: dict[str, Any], folder: Path, plan: dict[str, Any]) -> None:
    """Raise ConfigError if `folder` was begun or made with other values than `plan`'s."""
    options = {"source": "--source", "val_share": "--val-share", "num_shards": "--shards"}
    for name, value in plan.items():
        if begun.get(name) != value:
            key = options.get(name, "--tokenizer" if "tokenizer" in name else "--source")
            mend = f"{folder} was made with {name}={begun.get(name)}; keep to it or delete it"
            raise ConfigError(key, value, mend)


def _shard(
    folder: Path,
    data: "Dataset",
    rows: range,
    words: "Tokenizer",
    val_share: float,
    advance: Callable[[int], None],
) -> Store:
    chosen: dict[str, list[int]] = {part: [] for part in PARTS}
    for row in rows:
        chosen["val" if validates(row, val_share) else "train"].append(row)
    size = words.get_vocab_size()

    def tokens(part: str) -> Iterator[np.ndarray]:
        return encoded(_texts(data, chosen[part], advance), words, token_dtype(size))

    parts = {part: tokens(part) for part in PARTS}
    return create(folder, parts, size, separator_id(words), {"rows": [rows.start, rows.stop]})


def _texts(data: "Dataset", rows: list[int], advance: Callable[[int], None]) -> Iterator[str]:
    for start in range(0, len(rows), _READ):
        some = rows[start : start + _READ]
        yield from (text or "" for text in data[some]["text"])
        advance(len(some))


def _joined(
    shards: list[Store], part: str, advance: Callable[[int], None], size: int = 1 << 24
) -> Iterator[np.ndarray]:
    for shard in shards:
        tokens = shard.tokens(part)
        for start in range(0, len(tokens), size):
            chunk = tokens[start : start + size]
            yield chunk
            advance(len(chunk))


def _brief(error: Exception) -> str:
    """The first line of an error, cut to a length that one line bears."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 120 else text[:117] + "..."
