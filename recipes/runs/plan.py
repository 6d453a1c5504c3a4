"""`python -m recipes run … --dry-run`: the runs that are missing, and how long they will train."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from co2.record.table import read_csv
from recipes.runs import measured
from recipes.runs.cells import Cell
from recipes.runs.known import key_of

_REPEATS = ("train.seed", "--repeats")
"""What the runs of several seeds differ in. They take equally long."""

Kind = tuple[str, ...]
"""The words of a command, but for these and for what `tuned=true` stands for."""


def plan(cells: Iterable[Cell], out: Path) -> Iterator[str]:
    """Yield a line for each of these runs that is missing, with its time and its command, and a
    line for all together.

    A time is that of training, without start, evaluation and checkpoints: the median of the seeds
    that have finished here, or whose evaluations have been collected in `out`.

    Raises:
        ConfigError: if one of the runs cannot be made.
    """
    seconds = _collected(out)
    missing: list[Cell] = []
    for cell in dict.fromkeys(cells):
        summary = cell.summary()
        if summary is None:
            cell.check()
            missing.append(cell)
        elif "train_s" in summary:
            seconds.setdefault(_kind(cell.command), []).append(summary["train_s"])
    times = [
        statistics.median(seconds[kind]) if (kind := _kind(cell.command)) in seconds else None
        for cell in missing
    ]
    for cell, time in zip(missing, times, strict=True):
        yield f"{'unknown' if time is None else _text(time):>8}  {cell.command}"
    yield _whole(times)


def _collected(out: Path) -> dict[Kind, list[float]]:
    """Seconds of training of the runs whose evaluations have been collected."""
    ends: dict[tuple[str, ...], float] = {}
    for line in read_csv(out / "evals.csv"):
        ends[key_of(line)] = max(float(line["train_s"]), ends.get(key_of(line), 0.0))
    found: dict[Kind, list[float]] = {}
    for line in measured.read(out / "ours.csv"):
        if key_of(line) in ends:
            found.setdefault(_kind(line["command"]), []).append(ends[key_of(line)])
    return found


def _kind(command: str) -> Kind:
    words = command.partition("  # ")[0].split()
    return tuple(word for word in words if word.partition("=")[0] not in _REPEATS)


def _whole(times: Sequence[float | None]) -> str:
    known = [time for time in times if time is not None]
    if not known:
        return f"{len(times)} runs to make" + (", of unknown time" if times else "")
    part = "which train" if len(known) == len(times) else f"{len(known)} of which train"
    return (
        f"{len(times)} runs to make, {part} for {_text(sum(known))} in all where they were "
        "measured; results/runs.csv names the machines"
    )


def _text(seconds: float) -> str:
    """Hours, minutes and seconds: 0:01:30."""
    return str(timedelta(seconds=round(seconds)))
