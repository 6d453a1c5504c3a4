"""Table 3: scalability. Throughput of every method on slow and on fast networks.

    sudo make table3                                       all that is missing, in the laboratory

Cost: 180 trainings of 20 seconds to 3 minutes on 2 cores, 27 minutes a repeat (--seeds 0: the
first). All methods of a repeat take turns on one link, then on the next. Only scale=smoke is
measured, with as many workers as this machine has cores: two. What more of them do on one machine
is a matter of the cores they share. The paper's 8 to 128 GPUs are simulated, in a table of its own,
beside what the paper reports.
Found (results/tables/table3.md): on slow links AllReduce mostly waits, blocking methods wait for
nearly half of the time, and overlapped ones hardly at all. Throughput differs by a tenth between
trainings, so no method is shown to be equivalent to the limit. Quote this share of CO2's: `field`
has the first three of these repeats, results/lab/table.md two of a day with a faster processor.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from co2.record.table import Table
from recipes.paper import scaling
from recipes.recipe import Recipe, Row, Rows
from recipes.runs.laboratory import LabColumn
from recipes.tables import figures, shares
from recipes.tables.methods import LIMIT, METHODS

PART = "2 workers"
RATES = ("20", "100", "500", "unlimited")
AUTO = Row("CO2, τ auto", ("method=co2", "co2.tau=auto", "train.steps=180"))
"""Three times the steps of the others, because τ is chosen after 60."""


def name(rate: str) -> str:
    """The name of the column for this rate of every link."""
    return f"{PART}, {rate}" + ("" if rate == "unlimited" else " Mbit/s")


def tables(ours: Rows, paper: Rows) -> Iterator[Table]:
    """Shares of the limit, then what is simulated."""
    yield from shares.tables(RECIPE, ours)
    yield from scaling.tables(ours, paper)


def draw(ours: Rows, stem: Path) -> Iterator[Path]:
    """Draw throughput against bandwidth, nothing of it if none has run, then what is simulated."""
    names = {name(rate) for rate in RATES}
    if any(line["column"] in names for line in ours):
        path = figures.beside(stem, PART)
        _panel(ours, path)
        yield path
    yield from scaling.draw(stem)


def _panel(ours: Rows, path: Path) -> None:
    """A line for each method, over the rates."""
    with figures.panel(path, PART) as axis:
        for number, row in enumerate(RECIPE.rows):
            own = [line for line in ours if line["row"] == row.name]
            values = [[line for line in own if line["column"] == name(rate)] for rate in RATES]
            points = [(at, figures.mean(same)) for at, same in enumerate(values) if same]
            if points:
                x, y = zip(*points, strict=True)
                of_row = {"label": row.name, **figures.LIMIT}
                axis.plot(x, y, **(of_row if row.limit else figures.style(number, row.name)))
        axis.set_xticks(range(len(RATES)), list(RATES))
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.set_xlabel("rate of every link, Mbit/s")
        axis.set_ylabel("tokens/s of all workers")


def columns() -> Iterator[LabColumn]:
    """Throughput on every kind of link, then the time spent waiting.

    Waiting is of worker 0 in the same trainings. It changes less from one to the next than
    throughput, which follows the speed of the processor.
    """
    throughput = [
        LabColumn(
            name(rate),
            ("--workers=2", f"--mbit={rate}"),
            "throughput",
            digits=0,
            curve=False,
            part=PART,
        )
        for rate in RATES
    ]
    yield from throughput
    part = f"{PART}, waiting for communication %"
    for column in throughput:
        yield replace(
            column,
            name=f"{part}, {column.head}",
            metric="exposed_share",
            lower=True,
            factor=100,
            digits=1,
            without=(LIMIT.name,),
            part=part,
        )


RECIPE = Recipe(
    name="table3",
    title="Scalability",
    text="Tokens per second of all workers together on GPT-2, every worker on a link of its own. "
    "Both workers are on one machine, each on a core of its own. Repeats stand in for seeds; each "
    "has every method on every link before the next begins. Trainings have 60 steps, with τ auto "
    "180, of which the first 60 are with τ = 12. The paper measured other networks, which the "
    "simulated table has.",
    rows=(*METHODS, AUTO, LIMIT),
    columns=tuple(columns()),
    seeds=(0, 1, 2, 3, 4),
    scales=("smoke",),
    draw=draw,
    beside=tables,
    undisturbed=True,
)
