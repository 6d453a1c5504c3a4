"""The tables of GLUE on disk: `<root>/glue/<task>/`.

A task's folder is what datasets' `save_to_disk` writes, or holds parquet files whose names begin
with the split's, as those of nyu-mll/glue on the hub do. Test splits have no labels and are never
read.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from co2.atomic import locked, require_writable
from co2.errors import first_line
from tasks.glue.examples import Examples, documents
from tasks.shared.progress import progress
from tasks.text.store import FORMAT, PARTS, Store, create, open_store, token_dtype
from tasks.text.text import encoded, separator_id

if TYPE_CHECKING:
    from pyarrow import Table


@dataclass(frozen=True)
class GlueTask:
    """One of the nine tasks. The numbers of rows are those that the publisher names."""

    columns: tuple[str, ...]
    """Of the text: a sentence, or two."""
    rows: dict[str, int]
    """Of every split with labels."""
    num_labels: int = 2
    """Classes; 1 stands for a regression."""
    metrics: tuple[str, ...] = ("accuracy",)

    @property
    def validation(self) -> tuple[str, ...]:
        """The splits that validate."""
        return tuple(split for split in self.rows if split != "train")


_PAIR = ("sentence1", "sentence2")
GLUE_TASKS = {
    "cola": GlueTask(("sentence",), {"train": 8551, "validation": 1043}, metrics=("mcc",)),
    "sst2": GlueTask(("sentence",), {"train": 67349, "validation": 872}),
    "mrpc": GlueTask(_PAIR, {"train": 3668, "validation": 408}, metrics=("f1", "accuracy")),
    "qqp": GlueTask(
        ("question1", "question2"),
        {"train": 363846, "validation": 40430},
        metrics=("f1", "accuracy"),
    ),
    "stsb": GlueTask(
        _PAIR, {"train": 5749, "validation": 1500}, num_labels=1, metrics=("pearson", "spearman")
    ),
    "mnli": GlueTask(
        ("premise", "hypothesis"),
        {"train": 392702, "validation_matched": 9815, "validation_mismatched": 9832},
        num_labels=3,
    ),
    "qnli": GlueTask(("question", "sentence"), {"train": 104743, "validation": 5463}),
    "rte": GlueTask(_PAIR, {"train": 2490, "validation": 277}),
    "wnli": GlueTask(_PAIR, {"train": 635, "validation": 71}),
}


class BadTable(ValueError):
    """A split that cannot be used, in one line."""


def read_split(folder: Path, name: str, split: str) -> "Table":
    """The texts and the column "label" of a split.

    Args:
        folder: of the task.
        name: of the task.
    Raises:
        BadTable: it is missing or damaged, or its columns or labels are not the task's.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    task, files = GLUE_TASKS[name], _files(folder, split)
    wanted = [*task.columns, "label"]
    if not files:
        raise BadTable(f"{folder}: has no split {split}")
    try:
        if files[0].suffix == ".parquet":
            table = pa.concat_tables([pq.read_table(file) for file in files])
        else:
            table = pa.concat_tables([_arrow(file) for file in files])
    except (OSError, pa.ArrowException) as error:
        raise BadTable(f"{folder}: {split} cannot be read ({first_line(error)})") from None
    missing = [column for column in wanted if column not in table.column_names]
    if missing:
        raise BadTable(f"{folder}: {split} has no column {missing[0]}")
    table = table.select(wanted)
    if len(table) == 0 or any(column.null_count for column in table.columns):
        raise BadTable(f"{folder}: {split} has no rows, or empty fields")
    for column in task.columns:
        kind = table[column].type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise BadTable(f"{folder}: {split} has {kind} values, not texts, in {column}")
    labels = table["label"].to_numpy()
    if labels.dtype.kind not in ("iuf" if task.num_labels == 1 else "iu"):
        raise BadTable(f"{folder}: {split} has labels that are no numbers, or not whole ones")
    low, high = (0, 5) if task.num_labels == 1 else (0, task.num_labels - 1)
    if not (labels.min() >= low and labels.max() <= high):  # nor a NaN
        raise BadTable(f"{folder}: {split} has labels that are not from {low} to {high}")
    return table


def read_examples(folder: Path, name: str, words: Store, root: Path) -> dict[str, Examples]:
    """The training and validation examples of a task; those of its validation splits follow one
    another.

    Texts are tokenized once and kept in a store under `root`/text, whose documents they are.

    Args:
        words: has the tokenizer.
    Raises:
        BadTable: a split cannot be used.
        OSError: `root` cannot be written.
    """
    task = GLUE_TASKS[name]
    splits = {"train": ("train",), "val": task.validation}
    tables = {part: [read_split(folder, name, one) for one in splits[part]] for part in PARTS}
    tokenizer = (words.folder / "tokenizer.json").read_bytes()
    identity = hashlib.sha256(digest(folder, name).encode() + tokenizer).hexdigest()
    place = root / "text" / f"glue_{name}-{identity[:16]}-v{FORMAT}"
    store = open_store(place)
    if store is None:
        require_writable("data.root", root, place)
        with locked(place):  # another process may have made it while this one waited
            store = open_store(place) or _encode(place, tables, name, words)
    made = {}
    for part in PARTS:
        starts, lengths = (each.reshape(-1, len(task.columns)) for each in documents(store, part))
        labels = np.concatenate([table["label"].to_numpy() for table in tables[part]])
        kind = np.float32 if task.num_labels == 1 else np.int64
        first = len(tables[part][0])
        made[part] = Examples(store.tokens(part), starts, lengths, labels.astype(kind), first)
        assert len(starts) == len(labels)
    return made


def _encode(place: Path, tables: dict[str, list["Table"]], name: str, words: Store) -> Store:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(words.folder / "tokenizer.json"))
    size, end = words.meta["vocab_size"], words.meta["separator"]
    separator = tokenizer.id_to_token(end)
    assert separator is not None and separator_id(tokenizer, separator) == end
    rows = sum(len(table) for part in PARTS for table in tables[part])
    with progress(f"encoding {rows:,} rows of {name}, once", rows) as advance:
        chunks = {
            part: encoded(
                texts(tables[part], name, advance), tokenizer, token_dtype(size), separator
            )
            for part in PARTS
        }
        return create(place, chunks, size, end, {"data": name})


def texts(tables: list["Table"], name: str, advance: Callable[[int], None]) -> Iterator[str]:
    """The pieces of text, row by row; `advance` is told of each row."""
    for table in tables:
        columns = (table[column].to_pylist() for column in GLUE_TASKS[name].columns)
        for row in zip(*columns, strict=True):
            yield from row
            advance(1)


def digest(folder: Path, name: str) -> str:
    """The sha256 of the files of all splits with labels."""
    whole = hashlib.sha256()
    for split in GLUE_TASKS[name].rows:
        for file in _files(folder, split):
            whole.update(f"{split} {file.stat().st_size}\0".encode())
            with file.open("rb") as opened:
                while piece := opened.read(1 << 20):
                    whole.update(piece)
    return whole.hexdigest()


def _files(folder: Path, split: str) -> list[Path]:
    """The files of a split, in order: of `save_to_disk`, or parquet."""
    saved = sorted((folder / split).glob("data-*.arrow"))
    names = (f"{split}.parquet", f"{split}-*.parquet")
    return saved or sorted(path for name in names for path in folder.glob(name))


def _arrow(file: Path) -> "Table":
    import pyarrow as pa

    with pa.OSFile(str(file)) as source:
        return pa.ipc.open_stream(source).read_all()
