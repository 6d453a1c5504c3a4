"""Table 3: scalability. Throughput of every method on slow and on fast networks.

    sudo make table3                                       all that is missing, in the laboratory

Cost: 192 trainings of 20 seconds to 5 minutes on 2 cores, 50 minutes a repeat (--seeds 0 is the
first). Trainings in results/lab count as finished. Only scale=smoke is measured, with two and four
workers on one machine. The paper's 8 to 128 GPUs are simulated, in a table of its own, beside what
the paper reports.
Expected: on links of 20 Mbit/s AllReduce reaches a tenth of the limit or less, blocking methods
half of it, CO2 nearly all of it. Without a limit on the links AllReduce is a tenth behind the
others, which differ by no more than repeats do.
"""

from collections.abc import Iterator
from pathlib import Path

from recipes import figures, scaling
from recipes.laboratory import MEASURED_BEFORE, LabColumn
from recipes.methods import LIMIT, METHODS
from recipes.recipe import Recipe, Rows

WORKERS = (2, 4)
RATES = ("20", "100", "500", "unlimited")


def name(workers: int, rate: str) -> str:
    """The name of the column for so many workers and this rate of every link."""
    return f"{workers} workers, {rate}" + ("" if rate == "unlimited" else " Mbit/s")


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


RECIPE = Recipe(
    name="table3",
    title="Scalability",
    text="Tokens per second of all workers together on GPT-2, every worker on a link of its own. "
    "All workers share one machine's processor, so four are no faster than two. Repeats stand in "
    "for seeds. The paper measured other networks, which the simulated table has.",
    rows=(*METHODS, LIMIT),
    columns=tuple(
        LabColumn(
            name(workers, rate),
            (f"--workers={workers}", f"--mbit={rate}"),
            "throughput",
            digits=0,
            curve=False,
            before=MEASURED_BEFORE,
        )
        for workers in WORKERS
        for rate in RATES
    ),
    scales=("smoke",),
    draw=draw,
    beside=scaling.tables,
)
