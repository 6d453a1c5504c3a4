"""Figure 1: who computes, what is sent and who waits, from traces of real trainings.

    sudo make figure1                                      what is missing, in the laboratory

Cost: 9 trainings of a minute or less on 2 cores, 5 minutes in all. The picture shows the first
repeat. It is drawn again only where that repeat's traces are, in results/runs. The committed one is
of later runs than the table, whose traces did not mark the ends of steps.
Expected: on links of 100 Mbit/s AllReduce waits most of the time, Local SGD at the end of every
round, CO2 never.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from co2.record import timeline
from recipes.recipe import Recipe, Row, Rows
from recipes.runs.cells import SummaryJSON
from recipes.runs.laboratory import LabCell, LabColumn
from recipes.tables import figures

LINKS = ("--workers=2", "--mbit=100", "trace=true")
measured = partial(LabColumn, overrides=LINKS, digits=1, lower=True, curve=False)
"""A column that reads the same trainings."""


def per_step(run: SummaryJSON, clock: str) -> float:
    """Milliseconds a step of one of a summary's clocks.

    There is no column for throughput, because the time to write the trace is part of it.
    """
    return 1000 * run[clock] / run["steps"]


def draw(ours: Rows, stem: Path) -> Iterator[Path]:
    """Draw the timelines of all rows below each other, if their traces are here."""
    path = stem.with_name(f"{stem.name}.svg")
    runs = {}
    for row in RECIPE.rows:
        cell = RECIPE.cell(row, RECIPE.columns[0], "smoke", 0)
        assert isinstance(cell, LabCell)
        runs[row.name] = cell.folder()
    found = {name: timeline.read(folder) for name, folder in runs.items() if folder is not None}
    if len(found) == len(RECIPE.rows):
        figures.save(timeline.figure(timeline.alike(found)), path)
    if path.exists():
        yield path


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
