"""Table 3: scalability. Throughput of every method on slow and on fast networks.

    sudo make table3                                       all that is missing, in the laboratory

Cost: 360 trainings of 20 seconds to 5 minutes on 2 cores, an hour to an hour and a quarter a
repeat (--seeds 0: the first). All methods of a repeat take turns on one link, then on the next.
Only scale=smoke is measured, with two and four workers on one machine. The paper's 8 to 128 GPUs
are simulated, in a table of its own, beside what the paper reports. Collected are five repeats
with two workers; with four workers one, and throughput of older commits.
Found: on links of 20 Mbit/s AllReduce waits 89 % of the time, blocking methods 43 %, overlapped
ones 4 % or less; from 100 Mbit/s on .3 % or less, but with τ auto, which measures first, 2 to 3.
Throughput says the same, but differs by a tenth from one training to the next, so that no method
is shown to be equivalent to the limit. From 500 Mbit/s on auto takes τ = 1 and reaches 87 to 94 %
of the limit. It hardly waits then; what is lost is likely the outer step of every step, and gloo's
adding on the worker's own core. These were not measured apart.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from co2.record.table import Table
from recipes import figures, scaling, shares
from recipes.laboratory import LabColumn
from recipes.methods import LIMIT, METHODS
from recipes.recipe import Recipe, Row, Rows

WORKERS = (2, 4)
RATES = ("20", "100", "500", "unlimited")
AUTO = Row("CO2, τ auto", ("method=co2", "co2.tau=auto", "train.steps=180"))
"""Three times the steps of the others, because τ is chosen after 60."""


def name(workers: int, rate: str) -> str:
    """The name of the column for so many workers and this rate of every link."""
    return f"{workers} workers, {rate}" + ("" if rate == "unlimited" else " Mbit/s")


def tables(ours: Rows, paper: Rows) -> Iterator[Table]:
    """Shares of the limit, then what is simulated."""
    yield from shares.tables(RECIPE, ours)
    yield from scaling.tables(ours, paper)


def draw(ours: Rows, stem: Path) -> Iterator[Path]:
    """Draw throughput against bandwidth and against workers, then what is simulated."""
    for workers in WORKERS:
        columns = {rate: name(workers, rate) for rate in RATES}
        path = figures.beside(stem, f"{workers} workers")
        yield from _panel(ours, columns, path, f"{workers} workers", "rate of every link, Mbit/s")
    for rate in RATES:
        columns = {str(workers): name(workers, rate) for workers in WORKERS}
        title = "links without a limit" if rate == "unlimited" else f"links of {rate} Mbit/s"
        yield from _panel(ours, columns, figures.beside(stem, title), title, "workers")
    yield from scaling.draw(stem)


def _panel(
    ours: Rows, columns: dict[str, str], path: Path, title: str, along: str
) -> Iterator[Path]:
    """Draw throughput over these columns, by their names on the axis; nothing if none has run."""
    if not any(line["column"] in columns.values() for line in ours):
        return
    with figures.panel(path, title) as axis:
        for number, row in enumerate(RECIPE.rows):
            own = [line for line in ours if line["row"] == row.name]
            values = [[line for line in own if line["column"] == of] for of in columns.values()]
            points = [(at, figures.mean(same)) for at, same in enumerate(values) if same]
            if points:
                x, y = zip(*points, strict=True)
                of_row = {"label": row.name, **figures.LIMIT}
                axis.plot(x, y, **(of_row if row.limit else figures.style(number, row.name)))
        axis.set_xticks(range(len(columns)), list(columns))
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.set_xlabel(along)
        axis.set_ylabel("tokens/s of all workers")
    yield path


def columns() -> Iterator[LabColumn]:
    """For each number of workers throughput on every kind of link, then the time spent waiting.

    Waiting is of worker 0 in the same trainings. It changes less from one to the next than
    throughput, which follows the speed of the processor.
    """
    for workers in WORKERS:
        throughput = [
            LabColumn(
                name(workers, rate),
                (f"--workers={workers}", f"--mbit={rate}"),
                "throughput",
                digits=0,
                curve=False,
                part=f"{workers} workers",
            )
            for rate in RATES
        ]
        yield from throughput
        for column in throughput:
            part = f"{column.part}, waiting for communication %"
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
    "All workers share one machine's processor, so four are no faster than two. Repeats stand in "
    "for seeds; each has every method on every link before the next begins. Trainings have 60 "
    "steps, with τ auto 180, of which the first 60 are with τ = 12. The paper measured other "
    "networks, which the simulated table has.",
    rows=(*METHODS, AUTO, LIMIT),
    columns=tuple(columns()),
    seeds=(0, 1, 2, 3, 4),
    scales=("smoke",),
    draw=draw,
    beside=tables,
    undisturbed=True,
)
