"""Figure 1: who computes, what is sent and who waits, from traces of real trainings.

    sudo make figure1                                      what is missing, in the laboratory

Cost: 9 trainings of a minute or less on 2 cores, 5 minutes in all. The picture shows the first
repeat, from results/timelines.csv, which is written where that repeat's traces are, in
results/runs. The committed one is of later runs than the table, whose traces did not mark the ends
of steps; its spans were read from the picture that had been drawn from the traces.
Expected: on links of 100 Mbit/s AllReduce waits most of the time, Local SGD at the end of every
round, CO2 never.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from co2.record import drawing, timeline
from co2.record.table import Table, read_csv
from co2.record.timeline import Span, Timeline
from recipes.recipe import Recipe, Row, Rows
from recipes.runs.cells import SummaryJSON
from recipes.runs.laboratory import LabCell, LabColumn

LINKS = ("--workers=2", "--mbit=100", "trace=true")
measured = partial(LabColumn, overrides=LINKS, digits=1, lower=True, curve=False)
"""A column that reads the same trainings."""
SPANS = "timelines.csv"
HEAD = ("row", "steps", "kind", "begin_s", "end_s")
KINDS = ("compute", "outer_steps", "snapshots", "collectives", "still")


def per_step(run: SummaryJSON, clock: str) -> float:
    """Milliseconds a step of one of a summary's clocks.

    There is no column for throughput, because the time to write the trace is part of it.
    """
    return 1000 * run[clock] / run["steps"]


def draw(ours: Rows, stem: Path) -> Iterator[Path]:
    """Draw the timelines of all rows below each other, from SPANS, which is written where the
    traces are."""
    path, spans = stem.with_name(f"{stem.name}.svg"), stem.parents[1] / SPANS
    cells = {row.name: RECIPE.cell(row, RECIPE.columns[0], "smoke", 0) for row in RECIPE.rows}
    folders = {name: cell.folder() for name, cell in cells.items() if isinstance(cell, LabCell)}
    traced = {name: timeline.read(folder) for name, folder in folders.items() if folder is not None}
    if len(traced) == len(RECIPE.rows):
        write(timeline.alike(traced), spans)
    known = read(spans)
    if known:
        drawing.save(timeline.figure(known), path)
        yield path


def write(found: Mapping[str, Timeline], path: Path) -> None:
    """A line for each span of each row."""
    Table(
        HEAD,
        [
            (row, lanes.steps, kind, f"{begin:.4f}", f"{end:.4f}")
            for row, lanes in found.items()
            for kind in KINDS
            for begin, end in getattr(lanes, kind)
        ],
    ).write_csv(path)


def read(path: Path) -> dict[str, Timeline]:
    """What `write` has written, but for when each step ended."""
    found: dict[str, Timeline] = {}
    for row, lines in groupby(read_csv(path), key=itemgetter("row")):
        spans: dict[str, list[Span]] = {kind: [] for kind in KINDS}
        for line in lines:
            spans[line["kind"]].append((float(line["begin_s"]), float(line["end_s"])))
        seconds, steps = max(end for own in spans.values() for _, end in own), int(line["steps"])
        ends = [seconds * step / steps for step in range(steps + 1)]
        found[row] = Timeline(seconds, **spans, step_ends=ends)
    return found


RECIPE = Recipe(
    name="figure1",
    title="Timeline",
    text="GPT-2, two workers on links of 100 Mbit/s. The picture shows equally many steps of every "
    "row, after two rounds of warm-up: above what worker 0 computes, below what travels; red where "
    "it stands still although something travels. Repeats stand in for seeds.",
    rows=(
        Row("AllReduce", ("method=allreduce",)),
        Row("Local SGD", ("method=local_sgd",)),
        Row("CO2", ("method=co2",)),
    ),
    columns=(
        measured("stands still, ms a step", metric=lambda run: per_step(run, "exposed_s")),
        measured("network at work, ms a step", metric=lambda run: per_step(run, "comm_s")),
        measured("overlap, %", metric="overlap", factor=100, lower=False),
    ),
    scales=("smoke",),
    draw=draw,
    undisturbed=True,
)
