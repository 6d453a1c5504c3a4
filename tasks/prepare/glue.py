"""GLUE's nine tasks, for task=glue: <root>/glue/<task>/<split>-00000-of-00001.parquet."""

import argparse
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from co2.atomic import locked, require_writable
from co2.errors import ConfigError
from tasks.glue.glue_tables import GLUE_TASKS, BadTable, read_split
from tasks.prepare.documents import brief
from tasks.shared.progress import progress

if TYPE_CHECKING:
    from pyarrow import Table

HUB = "nyu-mll/glue"

HELP = f"""\
GLUE for task=glue glue.name=cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte or wnli.

Downloads the nine tasks ({HUB}; some 150 MB; every task has terms of its own, see
https://gluebenchmark.com) and writes their training and validation splits to
  <root>/glue/<task>/{{train,validation}}-00000-of-00001.parquet
mnli has validation_matched and validation_mismatched. Stop it whenever you like; the same command
goes on with the next task.

Without the network:
  --source FOLDER, with a folder for each task, which datasets' save_to_disk wrote or which holds
  parquet files, as the hub's repository does."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its own options."""
    what = "a folder or a data set of the hub"
    parser.add_argument("--source", default=HUB, help=f"{what} (default: {HUB})")


def run(options: argparse.Namespace) -> str:
    """The command line's work; returns what to say at the end."""
    root = Path(options.root) / "glue"
    try:
        with locked(root), progress("GLUE", len(GLUE_TASKS)) as advance:
            for name in GLUE_TASKS:
                if not (root / name).exists():
                    require_writable("--root", options.root, root / name)
                    _write(root / name, _splits(options.source, name))
                advance(1)
    except OSError as error:
        what = f"{error.filename or root}: {error.strerror or error}"
        hint = f"{what}; make room or choose another"
        raise ConfigError("--root", options.root, hint) from None
    return f"{root}: {len(GLUE_TASKS)} tasks; train with: task=glue glue.name=rte init_from=RUN"


def check(path: Path, options: argparse.Namespace) -> Iterator[str]:
    """See `DataSet.check`: splits, columns, labels and numbers of rows."""
    yield from _faults(path, counted=True)


def verify(path: Path) -> Iterator[str]:
    """See `DataSet.verify`."""
    yield from _faults(path, counted=False)


def _faults(path: Path, counted: bool) -> Iterator[str]:
    for name, task in GLUE_TASKS.items():
        if not (path / name).is_dir():
            yield f"{path / name}: no such folder"
            continue
        for split, expected in task.rows.items():
            try:
                found = len(read_split(path / name, name, split))
            except BadTable as bad:
                yield str(bad)
                continue
            if counted and found != expected:
                yield f"{path / name}: {split} has {found} rows, not {expected}"


def _splits(source: str, name: str) -> dict[str, "Table"]:
    """The splits with labels. Raises `ConfigError` if they cannot be had or used."""
    folder = Path(source) / name
    try:
        if not Path(source).is_dir():
            folder = _downloaded(source, name)
        return {split: read_split(folder, name, split) for split in GLUE_TASKS[name].rows}
    except BadTable as bad:
        hint = f"{bad}; give a folder with parquet files, as {HUB} has them on the hub"
        raise ConfigError("--source", source, hint) from None


def _downloaded(source: str, name: str) -> Path:
    """The folder that the hub's client keeps a task's parquet files in."""
    from huggingface_hub import snapshot_download

    try:
        whole = snapshot_download(source, repo_type="dataset", allow_patterns=f"{name}/*.parquet")
    except Exception as error:  # the hub's client raises many kinds
        hint = (
            f"cannot be loaded ({brief(error)}); check the name and the network, or give a folder"
        )
        raise ConfigError("--source", source, hint) from None
    return Path(whole) / name


def _write(folder: Path, splits: dict[str, "Table"]) -> None:
    """Write a task's splits aside and rename the folder."""
    import pyarrow.parquet as pq

    aside = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for split, table in splits.items():
        pq.write_table(table, aside / f"{split}-00000-of-00001.parquet")
    os.rename(aside, folder)
