"""A laboratory of slow networks: `python -m co2.lab --workers 2 --mbit 20,100,unlimited`.

Every worker is a process of train.py in a network namespace of its own, on a link with a real rate
(slow_network.py): real collectives over real TCP, on one machine. `none` is the same training
without any communication, the limit that every method is compared with. Cells that have finished
are kept, so an interrupted table goes on where it stopped.

Whatever follows the options is an override of train.py: `python -m co2.lab --mbit 20 task=vit`.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from co2.errors import ConfigError, nearest, require
from co2.lab.slow_network import Network, check_root, remove_leftovers
from co2.methods import METHODS
from co2.peers import PEERS, check_installed
from co2.record.provenance import of_run

TRAIN = Path(__file__).parents[2] / "train.py"
LIMIT = "none"
"""The method that does not communicate: local SGD with a round that never ends."""

DEFAULTS = (
    "train.steps=60",
    "train.eval_every=1000000",
    "checkpoint.every=0",
    "log.wandb=disabled",
)
TASK = ("task=gpt2", "gpt2.eval_samples=8")
"""Where no override names another."""
_MEMORY_OF_WORKER = 2**30
"""A guess at what a worker of a smoke task needs, with room to spare."""
_POLL_S = 0.05
_LAST_WORDS_S = 1.0
"""Worker 0 speaks for all, and may still be at it when another has ended."""
_FIGURES = (
    "throughput",
    "exposed_share",
    "overlap",
    "comm_s",
    "exposed_s",
    "bytes_per_step",
    "train_s",
    "steps",
)
"""Of a summary, for a row."""


@dataclass(frozen=True)
class Cell:
    """One training: so many workers, on links of this rate, under this method."""

    workers: int
    mbit: float | None
    method: str
    repeat: int

    @property
    def rate(self) -> str:
        return _named(self.mbit)

    def __str__(self) -> str:
        return f"{self.workers} workers, {self.rate} Mbit/s, {self.method}, repeat {self.repeat}"


@dataclass(frozen=True)
class Change:
    """All links have another rate from some time after the first step on."""

    seconds: float
    mbit: float | None
    cells: str | None = None
    """The rate of those cells that it is for; None for all."""

    def __str__(self) -> str:
        cells = "" if self.cells is None else f"{self.cells}:"
        return f"{cells}{_named(self.mbit)}@{self.seconds:g}s"


@dataclass(frozen=True)
class Conditions:
    """What is uneven: the same for every cell."""

    schedule: tuple[Change, ...] = ()
    slow_links: tuple[tuple[int, float], ...] = ()
    slow_cpus: tuple[tuple[int, float], ...] = ()

    @property
    def name(self) -> str:
        """Of a folder for the trainings under these conditions."""
        words = [str(change).replace(":", "to") for change in self.schedule]
        words += [f"link{worker}:{rate:g}" for worker, rate in self.slow_links]
        words += [f"cpu{worker}:{cores:g}" for worker, cores in self.slow_cpus]
        return "-".join(words) or "even"

    def rates(self, cell: Cell) -> list[float | None]:
        slow = dict(self.slow_links)
        return [slow.get(worker, cell.mbit) for worker in range(cell.workers)]


class Failed(RuntimeError):
    """A worker ended with an error; the message is its last line."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns 0; 1 when a training failed; 2 for a wrong value; 130: Ctrl-C."""
    parser = _parser()
    options, overrides = parser.parse_known_args(argv)
    try:
        cells, conditions = plan(options)
        unknown = [word for word in overrides if word.startswith("--") or "=" not in word]
        require(not unknown, "option", " ".join(unknown), "unknown; see --help")
        check_root()
        for name in remove_leftovers():
            print(f"removed what a killed run had left behind: {name}", file=sys.stderr)
        rows = list(measure(cells, conditions, options, overrides))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on with the next cell", file=sys.stderr)
        return 130
    from co2.lab import report as lab_report  # draws, so it needs matplotlib

    lab_report.write(rows, options.out, options.target_loss)
    return 0


def plan(options: argparse.Namespace) -> tuple[list[Cell], Conditions]:
    """The cells in the order in which they are measured, and the conditions.

    Raises:
        ConfigError: a value that makes no cell.
    """
    workers = [_count("--workers", word) for word in options.workers.split(",")]
    rates = [_rate("--mbit", word) for word in options.mbit.split(",")]
    methods = options.methods.split(",")
    known = {*METHODS, *PEERS, LIMIT}
    for method in methods:
        require(method in known, "--methods", method, nearest(method, known))
        if method in PEERS:
            check_installed(method)
    repeats = _count("--repeats", options.repeats)
    conditions = Conditions(
        tuple(_change(word, rates) for word in options.schedule),
        tuple(_slow("--slow-link", word) for word in options.slow_link),
        tuple(_slow("--slow-cpu", word) for word in options.slow_cpu),
    )
    for key, slow in (("--slow-link", conditions.slow_links), ("--slow-cpu", conditions.slow_cpus)):
        for worker, _ in slow:
            hint = f"workers are counted from 0 to {min(workers) - 1}"
            require(worker < min(workers), key, worker, hint)
    check_room(max(workers))
    # Methods take turns within a repeat, so that a noisy minute does not fall on one of them.
    order = itertools.product(range(repeats), workers, rates, methods)
    return [Cell(w, rate, method, n) for n, w, rate, method in order], conditions


def check_room(workers: int) -> None:
    """Refuse more workers than this machine's free memory holds. Raises `ConfigError`."""
    room = _memory_available() // _MEMORY_OF_WORKER
    hint = f"some {room} workers fit into this machine's free memory"
    require(workers <= room, "--workers", workers, hint)


def measure(
    cells: Sequence[Cell],
    conditions: Conditions,
    options: argparse.Namespace,
    overrides: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """A row of figures for each cell."""
    for number, cell in enumerate(cells, start=1):
        began = time.monotonic()
        summary = train(cell, conditions, Path(options.runs), overrides)
        row = _row(cell, summary, options.target_loss)
        took = time.monotonic() - began
        print(
            f"{number}/{len(cells)}  {cell}: {row['throughput']:,.0f} {summary['unit']}/s, "
            f"exposed {row['exposed_share']:.1%}, {took:.0f} s",
            flush=True,
        )
        yield row


def train(
    cell: Cell, conditions: Conditions, runs: Path, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """The summary of one training, from `runs` if it is there already.

    Raises:
        Failed: a worker ended with an error.
    """
    summary = finished(cell, conditions, runs)
    if summary is None:
        place = _place(cell, conditions, runs)
        command = [sys.executable, str(TRAIN), *words(cell.method, overrides)]
        command += [f"runs={place}", f"tag={cell.method}"]
        with Network(conditions.rates(cell), dict(conditions.slow_cpus)) as network:
            _watch(network, cell, command, conditions, place)
        summary = finished(cell, conditions, runs)
    if summary is None:
        raise Failed(f"{cell}: ended without a summary.json")
    return summary


def finished(cell: Cell, conditions: Conditions, runs: Path) -> dict[str, Any] | None:
    """The summary of a training that has ended, with its folder; None where there is none."""
    place = _place(cell, conditions, runs)
    found = sorted(place.glob(f"*/*/{cell.method}/seed*/summary.json"))
    if not found:
        return None
    return {**json.loads(found[-1].read_text()), "folder": str(found[-1].parent)}


def words(method: str, overrides: Sequence[str] = ()) -> list[str]:
    """What train.py is told of a cell, but for where its folder is."""
    named = any(word.startswith("task=") for word in overrides)
    return [*([] if named else TASK), *DEFAULTS, *_method(method), *_own(overrides, method)]


def _place(cell: Cell, conditions: Conditions, runs: Path) -> Path:
    return runs.absolute() / conditions.name / f"{cell.workers}x{cell.rate}-{cell.repeat}"


def _watch(
    network: Network, cell: Cell, command: list[str], conditions: Conditions, place: Path
) -> None:
    """Start all workers, change the links when it is time, and see them to their end."""
    processes = []
    for worker in range(cell.workers):
        env = {
            **os.environ,
            "RANK": str(worker),
            "WORLD_SIZE": str(cell.workers),
            "LOCAL_RANK": str(worker),
            "LOCAL_WORLD_SIZE": str(cell.workers),  # they share this machine's cores
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        processes.append(network.start(worker, command, env))
    changes = [c for c in conditions.schedule if c.cells in (None, cell.rate)]
    changes.sort(key=lambda change: change.seconds)
    began = None
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        if changes and began is None and _has_begun(place, cell):
            began = time.monotonic()
        if changes and began is not None and time.monotonic() - began >= changes[0].seconds:
            change = changes.pop(0)
            for worker in range(cell.workers):
                network.shape(worker, change.mbit)
        time.sleep(_POLL_S)
    failed = [number for number, process in enumerate(processes) if process.poll()]
    if failed:
        raise Failed(f"{cell}: {_reason(processes, failed[0])}")


def _has_begun(place: Path, cell: Cell) -> bool:
    files = place.glob(f"*/*/{cell.method}/seed*/metrics.jsonl")
    return any(path.stat().st_size > 0 for path in files)


def _reason(processes: Sequence[subprocess.Popen], failed: int) -> str:
    """The first error that any worker told; else the last words of the one that failed."""
    time.sleep(_LAST_WORDS_S)
    last = f"worker {failed}: status {processes[failed].returncode}"
    for number, process in enumerate(processes):
        process.kill()
        lines = [line for line in process.communicate()[0].splitlines() if line.strip()]
        for line in lines:
            if line.startswith("error: "):
                return line.removeprefix("error: ")
        if number == failed and lines:
            last = f"worker {number}: {lines[-1]}"
    return last


def _own(overrides: Sequence[str], method: str) -> list[str]:
    """The overrides without those of other methods' nodes: `co2.tau=24` is for co2 alone."""
    others = {*METHODS, *PEERS} - {method}
    return [word for word in overrides if word.lstrip("+~").partition(".")[0] not in others]


def _method(name: str) -> list[str]:
    if name == LIMIT:
        return ["method=local_sgd", "local_sgd.tau=1000000000"]
    return [f"method={name}"]


def _row(cell: Cell, summary: dict[str, Any], target_loss: float | None) -> dict[str, Any]:
    row = {
        "workers": cell.workers,
        "mbit": cell.rate,
        "method": cell.method,
        "repeat": cell.repeat,
        **{key: summary[key] for key in _FIGURES},
        "loss": summary["final"]["loss"],
        **of_run(Path(summary["folder"])),
    }
    if target_loss is not None:
        row["target_s"] = time_to(Path(summary["folder"]), target_loss)
    return row


def time_to(folder: Path, loss: float) -> float | None:
    """Seconds of training until an evaluation first gave this loss or less; None if none did."""
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        told = json.loads(line)
        if told["kind"] == "eval" and told["loss"] <= loss:
            return told["train_s"]
    return None


def _count(key: str, word: object) -> int:
    text = str(word)
    require(text.isdigit() and int(text) > 0, key, word, "must be a whole number, 1 or more")
    return int(text)


def _rate(key: str, word: str) -> float | None:
    if word == "unlimited":
        return None
    rate = _number(word)
    require(rate is not None and rate > 0, key, word, "must be Mbit/s above 0, or unlimited")
    return rate


def _named(mbit: float | None) -> str:
    return "unlimited" if mbit is None else f"{mbit:g}"


def _change(word: str, rates: Sequence[float | None]) -> Change:
    """`20@10s`: 20 Mbit/s from 10 s on; `100:20@10s`: in the cells of 100 Mbit/s only."""
    hint = "must be RATE@SECONDSs or FROM:RATE@SECONDSs, as in 20@10s or 100:20@10s"
    match = re.fullmatch(r"(?:([^@:]+):)?([^@:]+)@([\d.]+)s", word)
    require(match is not None, "--schedule", word, hint)
    assert match is not None
    cells, mbit, seconds = match.group(1), match.group(2), _number(match.group(3))
    require(seconds is not None, "--schedule", word, hint)
    assert seconds is not None
    if cells is not None:
        known = [_named(rate) for rate in rates]
        cells = _named(_rate("--schedule", cells))
        require(cells in known, "--schedule", word, f"no cell has {cells}; known: {known}")
    return Change(seconds, _rate("--schedule", mbit), cells)


def _slow(key: str, word: str) -> tuple[int, float]:
    """`1:10`: worker 1, 10."""
    worker, _, value = word.partition(":")
    number = _number(value)
    good = worker.isdigit() and number is not None and number > 0
    require(good, key, word, "must be WORKER:VALUE with a value above 0, as in 1:0.5")
    assert number is not None
    return int(worker), number


def _number(word: str) -> float | None:
    with contextlib.suppress(ValueError):
        value = float(word)
        if value < float("inf"):
            return value
    return None


def _memory_available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("MemAvailable"))
    return int(kib) * 1024


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m co2.lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--workers", default="2", help="numbers of workers, as in 2,4")
    add("--mbit", default="20,100,500,unlimited", help="rates of every link")
    add("--methods", default=",".join([*METHODS, LIMIT]), help="and the limit, none; peers too")
    add("--repeats", default="1", help="of every cell; methods take turns")
    add(
        "--schedule",
        action="append",
        default=[],
        metavar="100:20@10s",
        help="rate later; repeatable",
    )
    add("--slow-link", action="append", default=[], metavar="1:10", help="worker 1: 10 Mbit/s")
    add("--slow-cpu", action="append", default=[], metavar="1:0.5", help="worker 1: half a core")
    add("--target-loss", type=float, help="tell the time to this validation loss")
    add("--runs", default="results/runs/lab", help="where the trainings are kept")
    add("--out", type=Path, default=Path("results/lab"), help="where table and figure go")
    return parser


if __name__ == "__main__":
    sys.exit(main())
