"""A hundred faults: does an elastic run end by itself, and what does it lose?

    sudo .venv/bin/python -m recipes run faults            all that is missing

Cost: 120 runs of half a minute on 2 cores, an hour. Disks and links want root.
Found (results/tables/faults.md): every disturbed run ends by itself, no step is missing or
repeated, and the loss stays within the spread between seeds.

Every cell is a run of train.py on the toy with four workers, to which one thing happens
(recipes/faults/trouble.py) at a step, and to a worker, drawn from its seed. Where links are cut
each worker is a machine of its own, and where the disk is full the run's folder lies on a
small one.
"""

import json
import math
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from co2.record.table import NOTHING, Table
from recipes.faults import trouble
from recipes.faults.columns import SEEDS, column
from recipes.faults.trouble import (
    LIMIT_S,
    SAMPLES,
    SILENT_S,
    STEPS,
    TAU,
    WORKERS,
    Machines,
    SmallDisk,
    Trouble,
)
from recipes.recipe import Recipe, Row, Rows
from recipes.runs.functions import FunctionCell, FunctionColumn
from recipes.runs.ledger import doubled_and_left_out
from recipes.tables.entries import by_seed, percent_above

METHODS = ("local_sgd", "diloco", "co2", "co2_keep")
UNDISTURBED = "nothing"

Fault = tuple[type[Trouble], Callable[[Any], None]]
"""A kind of run, and what happens to it. Any: such a run."""
FAULTS: dict[str, Fault] = {
    UNDISTURBED: (Trouble, trouble.nothing),
    "a worker killed": (Trouble, trouble.killed),
    "the writer killed": (Trouble, trouble.writer_killed),
    "two killed at once": (Trouble, trouble.two_killed),
    "another killed amid recovery": (Trouble, trouble.killed_amid_recovery),
    "another killed amid joining": (Trouble, trouble.killed_amid_joining),
    "a worker stopped": (Trouble, trouble.stopped),
    "a worker paused": (Trouble, trouble.paused),
    "told to stop, started again": (Trouble, trouble.told_to_stop),
    "the starter killed, started again": (Trouble, trouble.starter_killed),
    "checkpoint torn, started again": (Trouble, trouble.torn_checkpoint),
    "disk full during a save": (SmallDisk, trouble.disk_full),
    "a link cut for a moment": (Machines, trouble.cut_briefly),
    "a link cut, mended": (Machines, trouble.cut_off),
    "the network in two, mended": (Machines, trouble.parted),
}
TOKENS = {name: function.__name__ for name, (_, function) in FAULTS.items()}


def in_trouble(cell: FunctionCell) -> tuple[Trouble, Callable[[], None]]:
    """The run of a cell, and what is done to it."""
    (name,) = (name for name, token in TOKENS.items() if token == cell.settings["fault"])
    kind, fault = FAULTS[name]
    run = kind(cell)
    return run, partial(fault, run)


def train(cells: Sequence[FunctionCell]) -> None:
    """Make these runs, one after the other."""
    for number, cell in enumerate(cells, start=1):
        run, fault = in_trouble(cell)
        run.start()
        try:
            run.until_some_step()
            fault()
            found = figures(run, run.process.wait(LIMIT_S))
        except (TimeoutError, subprocess.TimeoutExpired):
            found = {"ended": 0.0}
        finally:
            run.kill_all()
        cell.finish(found, WORKERS, STEPS)
        print(f"{number} of {len(cells)}: {' '.join(cell.overrides)}, seed {cell.seed}: {found}")


def figures(run: Trouble, status: int) -> dict[str, float]:
    """What became of a run that has ended."""
    told = [line["step"] for line in run.lines("train")]
    changes = run.lines("members")
    summary = run.folder / "summary.json"
    final = json.loads(summary.read_text())["final"]["loss"] if summary.exists() else None
    earlier = (run.ledger / str(start) for start in range(1, run.starts))
    doubled, left_out = doubled_and_left_out([*earlier, run.ledger / "now"], SAMPLES)
    found = {
        "ended": float(status == 0 and final is not None),
        "wrong_steps": float(len(told) != STEPS or told != sorted(set(told))),
        "lost": float(sum(len(line["lost"]) for line in changes)),
        "doubled": float(doubled),
        "left_out": float(left_out),
        "loss": math.inf if final is None else float(final),
    }
    seconds = [float(line["seconds"]) for line in changes]
    return found | ({"seconds": max(seconds)} if seconds else {})


def row(name: str, method: str) -> Row:
    """A method with a fault."""
    return Row(f"{name}: {method}", (f"method={method}", f"fault={TOKENS[name]}"))


ENDED, WRONG = (
    column("ended by itself", "ended", 2, train),
    column("steps wrong", "wrong_steps", 2, train),
)
DOUBLED = column("samples doubled", "doubled", 0, train)
LEFT_OUT = column("samples left out", "left_out", 0, train)
LOST, SECONDS = (
    column("replicas lost", "lost", 1, train),
    column("seconds to go on", "seconds", 2, train),
)
LOSS = column("loss", "loss", 4, train)


def tables(ours: Rows, _: Rows) -> Iterator[Table]:
    """One line for each kind of fault, over all methods and seeds."""
    values = by_seed(ours)
    usual = {method: values.get((f"{UNDISTURBED}: {method}", LOSS.name), {}) for method in METHODS}
    lines = []
    for name in TOKENS:

        def of(where: FunctionColumn, fault: str = name) -> list[float]:
            found = (values.get((f"{fault}: {method}", where.name), {}) for method in METHODS)
            return [value for one in found for value in one.values()]

        ended, seconds = of(ENDED), of(SECONDS)
        if not ended:
            continue
        above: list[float] = []
        for method in METHODS:
            losses = values.get((f"{name}: {method}", LOSS.name), {})
            finite = {seed: loss for seed, loss in losses.items() if math.isfinite(loss)}
            like = usual[method]
            if name == UNDISTURBED:
                like = dict.fromkeys(finite, statistics.fmean(finite.values()))
            above += percent_above(finite, like).values()
        share = f"{statistics.fmean(above):+.1f}" if above else NOTHING
        if len(above) > 1:
            share += f" ± {statistics.stdev(above):.1f}"
        lines.append(
            (
                name,
                f"{ended.count(1.0)} of {len(ended)}",
                str(int(sum(of(WRONG)))),
                f"{sum(of(LOST)) / len(ended):.1f}",
                str(int(sum(of(DOUBLED)))),
                f"{statistics.fmean(of(LEFT_OUT)):.0f}" if of(LEFT_OUT) else NOTHING,
                f"{statistics.median(seconds):.2f}" if seconds else NOTHING,
                f"{max(seconds):.2f}" if seconds else NOTHING,
                share,
            )
        )
    if lines:
        yield Table(
            name="faults_kinds",
            title="Faults, by kind",
            text="Over all methods and seeds. Wrong steps: runs in which a step is missing or told "
            "twice. Samples: trained on twice within an epoch, in all runs; and left out of whole "
            f"epochs, of {SAMPLES} each, on average. Seconds: from noticing a loss until training "
            "goes on, without the time until it is noticed. Loss: percent above that of the "
            "undisturbed run of the same method and seed, ± standard deviation; the first line is "
            "the spread of those between seeds.",
            head=(
                *("fault", "ended", "steps wrong", "lost", "doubled", "left out"),
                *("seconds", "longest", "loss, %"),
            ),
            rows=lines,
        )


RECIPE = Recipe(
    name="faults",
    title="A hundred faults",
    text=f"Toy, {WORKERS} workers on 2 cores, {STEPS} steps, τ = {TAU}, launch.elastic=true with "
    f"four restarts and launch.silent_s={SILENT_S:g}. What happens, and at which step and to whom, "
    "is drawn from the seed. co2_keep sends the model whole, without momentum.",
    rows=tuple(row(name, method) for name in TOKENS for method in METHODS),
    columns=(ENDED, WRONG, LOST, DOUBLED, LEFT_OUT, SECONDS, LOSS),
    seeds=SEEDS,
    scales=("smoke",),
    beside=tables,
    listed=False,
)
