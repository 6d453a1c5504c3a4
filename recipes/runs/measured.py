"""What was measured: results/ours.csv has a line for each value, and runs.csv beside it one for
each run that values come from."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from co2.errors import ConfigError
from co2.record.table import Table, read_csv

Line = TypeVar("Line", bound=Mapping[str, object])
"""A line of one of the files."""

KEY = ("recipe", "row", "column", "scale", "seed")
VALUES = (*KEY, "value")
NEWER = ("torch", "fingerprint")
"""What runs of earlier versions have not recorded; empty for them."""
SOURCES = ("commit", "hardware", "workers", "steps", "folder", "command", "digest", *NEWER)
LINE = (*VALUES, *SOURCES)
"""What is known of a value."""
RUN = "run"
"""The column that leads from a value to its run."""
_NUMBERS = ("seed", "step", "rung", "trial")
"""Columns that are sorted as numbers."""


def read(path: Path) -> list[dict[str, str]]:
    """The lines of an ours.csv, each with what is known of its run; none where there is no file.
    Raises `ConfigError` where a run is missing in runs.csv."""
    lines, runs = read_csv(path), {line.pop(RUN): line for line in read_csv(_runs(path))}
    missing = {line[RUN] for line in lines} - runs.keys()
    if missing:
        hint = f"{_runs(path).name} has no run {min(missing)}; take both files from one commit"
        raise ConfigError("results", path, hint)
    none = dict.fromkeys(NEWER, "")
    return [{**{name: line[name] for name in VALUES}, **none, **runs[line[RUN]]} for line in lines]


def in_order(lines: Iterable[Line], columns: Sequence[str]) -> list[Line]:
    """The lines sorted by these columns, the first of which counts most. Files have one order
    whatever was collected last, so a commit shows changed values alone."""

    def place(line: Line) -> tuple[int | str, ...]:
        texts = ((name, str(line[name])) for name in columns)
        return tuple(int(text) if name in _NUMBERS else text for name, text in texts)

    return sorted(lines, key=place)


def write(path: Path, lines: Iterable[Mapping[str, object]]) -> None:
    """The reverse of `read`: lines with the fields of `LINE`. They are written in order, and their
    runs in the order in which values come from them."""
    values: list[dict[str, object]] = []
    runs: dict[str, dict[str, object]] = {}
    none = dict.fromkeys(NEWER, "")
    for line in in_order([{**none, **line} for line in lines], LINE):
        source = {name: str(line[name]) for name in SOURCES}
        known = {name: text for name, text in source.items() if text or name not in NEWER}
        run = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:12]
        runs[run] = {RUN: run, **source}
        values.append({**{name: line[name] for name in VALUES}, RUN: run})
    Table.of_records(values, (*VALUES, RUN)).write_csv(path)
    Table.of_records(list(runs.values()), (RUN, *SOURCES)).write_csv(_runs(path))


def _runs(path: Path) -> Path:
    return path.with_name("runs.csv")
