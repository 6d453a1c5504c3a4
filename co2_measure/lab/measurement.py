"""What a trial gave: one line of the laboratory's cells.csv."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from co2.record import table
from co2.record.provenance import of_run
from co2.record.table import Table
from co2_measure.lab.training import train
from co2_measure.lab.trial import Conditions, Trial


@dataclass(frozen=True)
class Measurement:
    """The figures of one trial. The fields, in this order, are the columns of cells.csv."""

    workers: int
    mbit: str
    """Rate of every link in Mbit/s, or `unlimited`."""
    method: str
    repeat: int
    throughput: float
    """This and the figures up to `steps` are those of the run's summary, `record.metrics`."""
    exposed_share: float
    overlap: float | None
    comm_s: float
    exposed_s: float
    bytes_per_step: float
    train_s: float
    steps: int
    loss: float
    """Validation loss at the end."""
    commit: str
    hardware: str
    target_s: float | None = None
    """Seconds of training until the target loss; None if it was not reached, or not asked for.
    A column only where a target was given."""


_COLUMNS = [field.name for field in fields(Measurement)]
_OF_SUMMARY = _COLUMNS[_COLUMNS.index("throughput") : _COLUMNS.index("loss")]


def measure(
    trials: Sequence[Trial],
    conditions: Conditions,
    runs: Path,
    overrides: Sequence[str] = (),
    target_loss: float | None = None,
) -> Iterator[Measurement]:
    """Run every trial that `runs` does not have yet, print a line for each, and yield its figures.
    `target_loss` asks for the time until that loss.

    Raises:
        TrialFailed: a worker ended with an error.
    """
    for number, trial in enumerate(trials, start=1):
        began = time.monotonic()
        summary = train(trial, conditions, runs, overrides)
        folder = Path(summary["folder"])
        source = of_run(folder)
        found = Measurement(
            workers=trial.workers,
            mbit=trial.rate,
            method=trial.method,
            repeat=trial.repeat,
            loss=summary["final"]["loss"],
            target_s=None if target_loss is None else time_to_loss(folder, target_loss),
            commit=source["commit"],
            hardware=source["hardware"],
            **{name: summary[name] for name in _OF_SUMMARY},
        )
        took = time.monotonic() - began
        print(
            f"{number}/{len(trials)}  {trial}: {found.throughput:,.0f} {summary['unit']}/s, "
            f"exposed {found.exposed_share:.1%}, {took:.0f} s",
            flush=True,
        )
        yield found


def time_to_loss(folder: Path, loss: float) -> float | None:
    """Seconds of training until a run's validation loss was `loss` or less; None if it never was.

    The resolution is the number of steps between two evaluations.
    """
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line["kind"] == "eval" and line["loss"] <= loss:
            return line["train_s"]
    return None


def write_csv(found: Sequence[Measurement], path: Path, with_target: bool) -> None:
    """Write one line for each measurement; `with_target` adds the column `target_s`."""
    columns = _COLUMNS if with_target else _COLUMNS[:-1]
    Table.of_records([asdict(one) for one in found], columns).write_csv(path)


def read_csv(path: Path) -> list[Measurement]:
    """What `write_csv` has written."""
    kinds = get_type_hints(Measurement)

    def value(name: str, text: str) -> Any:
        kind = kinds[name] if isinstance(kinds[name], type) else float  # or None
        return kind(text) if text else None

    return [
        Measurement(**{name: value(name, text) for name, text in line.items()})
        for line in table.read_csv(path)
    ]
