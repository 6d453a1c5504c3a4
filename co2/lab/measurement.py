"""What a trial gave: one line of the laboratory's cells.csv, from a run's folder and back."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from co2.lab.training import SummaryJSON, train
from co2.lab.trial import Conditions, Trial
from co2.record import table
from co2.record.provenance import of_run


@dataclass(frozen=True)
class Measurement:
    """The figures of one trial. The fields, in this order, are the columns of cells.csv."""

    workers: int
    mbit: str
    """Rate of every link in Mbit/s, or `unlimited`."""
    method: str
    repeat: int
    throughput: float
    """Units (tokens or images) per second of all workers."""
    exposed_share: float
    """Share of the training time in which computation stood still for communication."""
    overlap: float | None
    """1 − exposed/comm; None without communication."""
    comm_s: float
    """Seconds in which a collective was under way, over the whole training."""
    exposed_s: float
    """Seconds in which computation stood still for communication."""
    bytes_per_step: float
    """Bytes that one worker sent per step."""
    train_s: float
    """Seconds of training, evaluations left out."""
    steps: int
    loss: float
    """Validation loss at the end."""
    commit: str
    hardware: str
    target_s: float | None = None
    """Seconds of training until the target loss; None if it was not reached, or not asked for.
    A column only where a target was given."""


def measure(
    trials: Sequence[Trial],
    conditions: Conditions,
    runs: Path,
    overrides: Sequence[str] = (),
    target_loss: float | None = None,
) -> Iterator[Measurement]:
    """Run every trial that `runs` does not have yet, print a line for each, and yield its figures.

    Raises:
        TrialFailed: a worker ended with an error.
    """
    for number, trial in enumerate(trials, start=1):
        began = time.monotonic()
        summary = train(trial, conditions, runs, overrides)
        found = measurement(trial, summary, target_loss)
        took = time.monotonic() - began
        print(
            f"{number}/{len(trials)}  {trial}: {found.throughput:,.0f} {summary['unit']}/s, "
            f"exposed {found.exposed_share:.1%}, {took:.0f} s",
            flush=True,
        )
        yield found


def measurement(
    trial: Trial, summary: SummaryJSON, target_loss: float | None = None
) -> Measurement:
    """The figures of a finished trial. `target_loss` asks for the time until that loss."""
    folder = Path(summary["folder"])
    return Measurement(
        workers=trial.workers,
        mbit=trial.rate,
        method=trial.method,
        repeat=trial.repeat,
        throughput=summary["throughput"],
        exposed_share=summary["exposed_share"],
        overlap=summary["overlap"],
        comm_s=summary["comm_s"],
        exposed_s=summary["exposed_s"],
        bytes_per_step=summary["bytes_per_step"],
        train_s=summary["train_s"],
        steps=summary["steps"],
        loss=summary["final"]["loss"],
        **of_run(folder),
        target_s=None if target_loss is None else time_to_loss(folder, target_loss),
    )


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
    columns = [field.name for field in fields(Measurement)]
    if not with_target:
        columns.remove("target_s")
    table.Table.of_records([asdict(one) for one in found], columns).write_csv(path)


def read_csv(path: Path) -> list[Measurement]:
    """The measurements that `write_csv` wrote."""
    return [_measurement_of(line) for line in table.read_csv(path)]


def _measurement_of(line: dict[str, str]) -> Measurement:
    def number(name: str) -> float | None:
        return float(line[name]) if line.get(name) else None

    return Measurement(
        workers=int(line["workers"]),
        mbit=line["mbit"],
        method=line["method"],
        repeat=int(line["repeat"]),
        throughput=float(line["throughput"]),
        exposed_share=float(line["exposed_share"]),
        overlap=number("overlap"),
        comm_s=float(line["comm_s"]),
        exposed_s=float(line["exposed_s"]),
        bytes_per_step=float(line["bytes_per_step"]),
        train_s=float(line["train_s"]),
        steps=int(line["steps"]),
        loss=float(line["loss"]),
        commit=line["commit"],
        hardware=line["hardware"],
        target_s=number("target_s"),
    )
