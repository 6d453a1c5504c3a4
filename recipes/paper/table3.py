"""Table 3: scalability. Throughput of every method on slow and on fast networks.

    sudo make table3                                       all that is missing, in the laboratory
    sbatch --nodes=16 --gpus-per-node=8 slurm/worlds.sbatch table3 --scale paper

Cost: smoke, 180 trainings of 20 seconds to 3 minutes on 2 cores, 27 minutes a repeat (--seeds 0:
the first). All methods of a repeat take turns on one link, then on the next. There are as many
workers as this machine has cores: two. What more of them do on one machine is a matter of the cores
they share. Paper: every method at τ = 12 and 48 on the 7B model, on 8, 16, 32, … workers up to
those of the job; a repeat has 14 trainings on each number, of 48 or 192 steps of one micro-batch.
Nobody has run it here. The paper's 8 to 128 GPUs are simulated too, in a table beside what the
paper reports.
Found (results/tables/table3.md): on slow links AllReduce mostly waits, blocking methods wait for
nearly half of the time, and overlapped ones hardly at all. Throughput differs by a tenth between
trainings, so no method is shown to be equivalent to the limit. Quote this share of CO2's: `field`
has the first three of these repeats, results/lab/table.md two of a day with a faster processor.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from co2.record.table import Table
from recipes.paper import scaling
from recipes.recipe import Recipe, Row, Rows
from recipes.runs import job
from recipes.runs.job import JobColumn
from recipes.runs.laboratory import LabColumn
from recipes.tables import figures, shares
from recipes.tables.entries import by_seed
from recipes.tables.methods import KEPT_WHOLE, LIMIT, METHODS, STEADY_GAP

PART = "2 workers"
RATES = ("20", "100", "500", "unlimited")
AUTO = Row("CO2, τ auto", ("method=co2", "co2.tau=auto", "train.steps=180"))
"""Three times the steps of the others, because τ is chosen after 60."""
TAU = 48
LONG = tuple(
    Row(f"{row.name}, τ = {TAU}", (*row.overrides, f"{row.overrides[0][7:]}.tau={TAU}"))
    for row in METHODS[1:]
)
"""The methods with rounds, at the paper's longer one."""
AT_SCALE = "TransNormer-LLM 7B"
BESIDE = {
    "AllReduce": "AllReduce",
    "CO2, τ = 12": STEADY_GAP.name,
    f"CO2, τ = {TAU}": f"{STEADY_GAP.name}, τ = {TAU}",
}
"""The paper's rows, and ours beside them: throughput does not depend on the gap."""
MODEL = ("task=transnormer", "transnormer.eval_samples=128", "train.global_batch=null")
"""The paper's. Every worker has one micro-batch in a step, on any number of them."""


def name(rate: str) -> str:
    """The name of the column for this rate of every link."""
    return f"{PART}, {rate}" + ("" if rate == "unlimited" else " Mbit/s")


def tables(ours: Rows, paper: Rows) -> Iterator[Table]:
    """Shares of the limit, then what the paper reports beside what is simulated and measured."""
    yield from shares.tables(RECIPE, ours)
    yield from scaling.tables(measured(ours), paper)


def measured(ours: Rows) -> dict[str, dict[int, float]]:
    """Tokens per second at scale, means over the repeats, by the paper's name of the method."""
    found: dict[str, dict[int, float]] = {}
    for name, row in BESIDE.items():
        for workers in scaling.GPUS:
            place = (row, f"{AT_SCALE}, {workers} GPUs")
            same = [line for line in ours if (line["row"], line["column"]) == place]
            if same:
                found.setdefault(name, {})[workers] = figures.mean(same)
    return found


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
    values = by_seed(ours)
    found = {
        row: {
            at: list(values[row.name, name(rate)].values())
            for at, rate in enumerate(RATES)
            if (row.name, name(rate)) in values
        }
        for row in RECIPE.rows
    }
    drawn = [row for row in RECIPE.rows if found[row]]
    with figures.panels(path, PART, drawn) as parts:
        for axis, rows in parts:
            figures.lines(axis, {row: found[row] for row in rows})
            axis.set_xticks(range(len(RATES)), list(RATES))
            axis.set_ylim(bottom=0)
            axis.yaxis.set_major_formatter("{x:,.0f}")
            axis.set_xlabel("rate of every link, Mbit/s")
            axis.set_ylabel("tokens/s of all workers")


def on_links(rates: Sequence[str], without: Sequence[str] = ()) -> Iterator[LabColumn]:
    """Throughput on every kind of link, then the time spent waiting. Rows `without` have neither.

    Waiting is of worker 0 in the same trainings. It changes less from one to the next than
    throughput, which follows the speed of the processor.
    """
    throughput = [
        LabColumn(
            name(rate),
            ("--workers=2", f"--mbit={rate}", *KEPT_WHOLE),
            "throughput",
            digits=0,
            curve=False,
            part=PART,
            without=tuple(without),
        )
        for rate in rates
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
            without=(*column.without, LIMIT.name),
            part=part,
        )


def at_scale(
    name: str, words: tuple[str, ...], worlds: Iterable[int], scale: str = "paper"
) -> Iterator[JobColumn]:
    """Throughput of a model on every number of workers, then the share of waiting, and by how much
    the computation beside it is slower than in the training without communication, which is one of
    the same job, of the same repeat.

    Waiting is of worker 0. It is not known of AllReduce inside fully_shard.
    """
    shape = partial(JobColumn, overrides=words, curve=False, scale=scale)
    for workers in worlds:
        yield shape(
            f"{name}, {workers} GPUs",
            metric=job.pace,
            digits=0,
            part=name,
            without=(AUTO.name,),
            workers=workers,
        )
    for part, metric, compare in (
        (f"{name}, waiting for communication %", job.waiting, None),
        (f"{name}, computation slower %", job.waiting, job.slower),
    ):
        for workers in worlds:
            yield shape(
                f"{part}, {workers} GPUs",
                metric=metric,
                lower=True,
                factor=100,
                digits=1,
                part=part,
                without=(AUTO.name, LIMIT.name),
                of=None if compare is None else LIMIT.name,
                compare=compare,
                workers=workers,
            )


RECIPE = Recipe(
    name="table3",
    title="Scalability",
    text="Tokens per second of all workers together. Repeats stand in for seeds; each has every "
    "method before the next begins. At scale=smoke on GPT-2, every worker on a link of its own and "
    "both on one machine, each on a core of its own: trainings have 60 steps, with τ auto 180, of "
    "which the first 60 are with τ = 12, and kept progress sends the model whole, without "
    "momentum. At scale=paper with one micro-batch of a worker in a "
    "step, all methods in turn by the workers of one job: two rounds of warm-up, then two that are "
    "timed. The paper measured other networks, which the simulated table has.",
    rows=(*METHODS, *LONG, AUTO, LIMIT),
    columns=(
        *on_links(RATES, [row.name for row in LONG]),
        *at_scale(AT_SCALE, MODEL, scaling.GPUS),
    ),
    seeds=(0, 1, 2, 3, 4),
    scales=("smoke", "paper"),
    draw=draw,
    beside=tables,
    undisturbed=True,
)
