"""The simulator held against the laboratory, point by point.

    python -m co2.lab …                      measures one or more cells.csv
    python -m benchmarks.simulator           simulates the same trainings, and writes the errors

The simulator gets the step's time from the same training without communication (method none), the
vector's bytes and the links' rate; a full packet of 1,514 bytes on the wire carries 1,448 bytes of
payload. Nothing is fitted. Points on unlimited links are left out.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from co2.record.table import read_csv
from co2_measure.simulate.methods import SIMULATED
from co2_measure.simulate.network import Link, Network
from co2_measure.simulate.schedule import simulate

PAYLOAD_SHARE = 1448 / 1514
GOAL = 0.05
HEAD = ["workers", "Mbit/s", "method", "repeats", "measured, 1/s", "simulated, 1/s", "error"]


@dataclass(frozen=True)
class Point:
    workers: int
    mbit: str
    method: str
    repeats: int
    measured: float
    """Units per second of all workers, median."""
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1

    def row(self) -> list[str]:
        key = [f"{self.workers}", self.mbit, self.method, f"{self.repeats}"]
        return [*key, f"{self.measured:,.0f}", f"{self.simulated:,.0f}", f"{self.error:+.1%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cells",
        type=Path,
        nargs="+",
        default=[Path("results/lab/cells.csv")],
    )
    parser.add_argument("--tau", type=int, default=12, help="of the trainings")
    parser.add_argument("--out", type=Path, default=Path("results/lab"))
    args = parser.parse_args()
    cells = [cell for path in args.cells for cell in read_csv(path)]
    found = points(cells, args.tau)
    errors = [abs(point.error) for point in found]
    intro = (
        f"Throughput, measured in [table.md](table.md) and simulated. Median error "
        f"{statistics.median(errors):.1%} (goal: under {GOAL:.0%}), largest {max(errors):.1%}, "
        f"{len(found)} points. Nothing is fitted: the step's time is that of `none`, "
        f"{PAYLOAD_SHARE:.1%} of a link's rate is payload."
    )
    rows = [point.row() for point in found]
    report.write(
        args.out / "simulator.md", "The simulator against the laboratory", intro, HEAD, rows
    )


def points(cells: Iterable[dict[str, str]], tau: int) -> list[Point]:
    """A point for each number of workers, rate and method; medians over the repeats."""
    groups: dict[tuple[int, str, str], list[dict[str, str]]] = defaultdict(list)
    for cell in cells:
        groups[int(cell["workers"]), cell["mbit"], cell["method"]].append(cell)
    found = []
    for (workers, mbit, method), rows in groups.items():
        if method == "none" or method not in SIMULATED or mbit == "unlimited":
            continue
        # Without communication the rate says nothing, so the cells of all rates count.
        limits = [
            row for key, some in groups.items() if key[::2] == (workers, "none") for row in some
        ]
        step_s = _median(limits, lambda row: float(row["train_s"]) / _timed(row))
        sent = float(groups[workers, mbit, "allreduce"][0]["bytes_per_step"])
        predicted = simulate(
            method=method,
            workers=workers,
            vector_bytes=round(sent * workers / (2 * (workers - 1))),
            step_s=step_s,
            network=Network(Link(float(mbit) * 1e6, efficiency=PAYLOAD_SHARE)),
            steps=int(rows[0]["steps"]),
            tau=tau,
        )
        # The first step is not timed; it waits for the network under allreduce alone.
        first_s = predicted.step_s if method == "allreduce" else step_s
        timed_s = predicted.step_s * int(rows[0]["steps"]) - first_s
        limit = _median(limits, lambda row: float(row["throughput"]))
        simulated = limit * step_s * _timed(rows[0]) / timed_s
        measured = _median(rows, lambda row: float(row["throughput"]))
        found.append(Point(workers, mbit, method, len(rows), measured, simulated))
    return found


def _timed(row: dict[str, str]) -> int:
    return int(row["steps"]) - 1


def _median(rows: list[dict[str, str]], value: Callable[[dict[str, str]], float]) -> float:
    return statistics.median(map(value, rows))


if __name__ == "__main__":
    main()
