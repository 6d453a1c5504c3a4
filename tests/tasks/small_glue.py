"""GLUE's nine tasks with a few rows each, in the hub's layout or in that of `save_to_disk`."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.glue.glue_tables import GLUE_TASKS

ROWS = {"train": 40, "validation": 23, "validation_matched": 13, "validation_mismatched": 11}
WORDS = ["replica", "anchor", "über", "round", "数", "step", "a", "the", "of", "gap"]


def table(name: str, split: str) -> pa.Table:
    """Sentences of random words, random labels and the index that the hub's tables have."""
    task, count = GLUE_TASKS[name], ROWS.get(split, 9)
    source = np.random.default_rng([len(split), *name.encode()])
    columns = {
        column: [" ".join(source.choice(WORDS, length)) for length in source.integers(1, 9, count)]
        for column in task.columns
    }
    labels = source.random(count) * 5 if task.num_labels == 1 else None
    if labels is None:
        labels = source.integers(0, task.num_labels, count)
    if split == "test":
        labels = np.full(count, -1)
    return pa.table({**columns, "label": labels, "idx": np.arange(count)})


def write(folder: Path, names: tuple[str, ...] = tuple(GLUE_TASKS), saved: bool = False) -> Path:
    """`folder`/<task> for each task.

    Args:
        saved: as `save_to_disk` does it; otherwise as the hub's parquet files.
    """
    from datasets import Dataset, DatasetDict

    for name in names:
        splits = {split: table(name, split) for split in (*GLUE_TASKS[name].rows, "test")}
        if saved:
            made = {split: Dataset(found) for split, found in splits.items()}
            DatasetDict(made).save_to_disk(folder / name)
            continue
        (folder / name).mkdir(parents=True)
        for split, found in splits.items():
            half = len(found) // 2
            for number, part in enumerate((found[:half], found[half:])):
                pq.write_table(part, folder / name / f"{split}-0000{number}-of-00002.parquet")
    return folder
