"""The whole field: bytes, rounds, throughput on slow links, and validation loss of every method.

    sudo .venv/bin/python -m recipes run field             losses here, throughput in the laboratory

Cost: 48 runs of two minutes, 21 of them table2's, and 96 trainings in the laboratory of half a
minute to three minutes on 2 cores, 48 of them table3's: three hours.
Found (results/tables/field.md): methods that overlap a whole round keep nearly all of the
throughput on slow links; of those, kept progress loses least. 1-bit Adam and ACCO are not shown to
lose anything, and exchange at every step.

Two workers. Bytes, rounds and loss are of conf's GPT-2 with the settings that `python -m recipes
tune gpt2` has found; the laboratory's is the larger one of co2_measure/lab/training.py, with conf's
settings but for 1-bit Adam and 0/1 Adam, which freeze v early, because its trainings have 60 steps.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from recipes.recipe import Column, Recipe, Row, Rows
from recipes.runs.cells import rounds
from recipes.runs.laboratory import LabColumn
from recipes.tables import figures
from recipes.tables.entries import Entry, entries
from recipes.tables.methods import EVERY_METHOD, KEPT_WHOLE, LIMIT

TASKS = ("gpt2",)
RATES = ("20", "100")
FREEZE = (
    "onebit_adam.freeze_step=10",
    "zero_one_adam.freeze_step=10",
    "zero_one_adam.double_every=15",
)
"""For 60 steps."""


def columns(task: str) -> Iterator[Column]:
    """What is measured of one task."""
    without = (LIMIT.name,)
    overrides = (f"task={task}",)
    yield Column(
        f"{task}, bytes per step",
        overrides,
        "bytes_per_step",
        lower=True,
        digits=0,
        curve=False,
        without=without,
        part=task,
    )
    yield Column(
        f"{task}, rounds",
        overrides,
        rounds,
        lower=True,
        digits=0,
        curve=False,
        without=without,
        part=task,
    )
    for rate in RATES:
        yield LabColumn(
            share(task, rate),
            # The laboratory's own settings of GPT-2 hold where no task is named.
            (
                "--workers=2",
                f"--mbit={rate}",
                *KEPT_WHOLE,
                *(() if task == "gpt2" else overrides),
                *(FREEZE if task == "gpt2" else ()),
            ),
            "throughput",
            digits=1,
            curve=False,
            of=LIMIT.name,
            part=task,
        )
    yield Column(
        loss(task),
        overrides,
        "final.loss",
        lower=True,
        digits=4,
        without=without,
        part=task,
    )


def share(task: str, rate: str) -> str:
    """The name of the column for throughput on links of this rate."""
    return f"{task}, % of the throughput without communication, {rate} Mbit/s"


def loss(task: str) -> str:
    """The name of the column for validation loss."""
    return f"{task}, validation loss"


def draw(ours: Rows, stem: Path) -> Iterator[Path]:
    """Draw throughput to the right and loss upwards, a figure for each task and rate."""
    found = {(e.column.name, e.row.name): e for e in entries(RECIPE, ours, "smoke")}
    for task in TASKS:
        for rate in RATES:
            names = (share(task, rate), loss(task))
            both = {
                row: [found[name, row.name] for name in names]
                for row in EVERY_METHOD
                if all((name, row.name) in found for name in names)
            }
            known = {row: own for row, own in both.items() if all(entry.values for entry in own)}
            if known:
                path = figures.beside(stem, task, rate)
                _figure(known, path, f"{task}, {rate} Mbit/s")
                yield path


def _figure(dots: Mapping[Row, Sequence[Entry]], path: Path, title: str) -> None:
    """A dot for each method, with standard deviations."""
    looks = figures.styles(dots)
    with figures.panels(path, title, list(dots)) as parts:
        for axis, rows in parts:
            for row in rows:
                throughput, final = dots[row]
                style = looks[row.name] | {"linestyle": "none", "elinewidth": 1}
                axis.errorbar(throughput.mean, final.mean, final.spread, throughput.spread, **style)
            axis.set_xlim(0, 125)
            axis.set_xlabel("throughput, % of that\nwithout communication")
            axis.set_ylabel("validation loss")


RECIPE = Recipe(
    name="field",
    title="The field",
    text="Two workers, every method with the settings that won in its trials. Rounds: how many "
    "times the replicas have exchanged anything; what DES-LOC sends together is one. Throughput is "
    "measured in the laboratory, where repeats stand in for seeds; its GPT-2 has 1.3 M parameters "
    "and default settings, but for co2_keep, which is whole and without momentum. "
    "The loss of co2_keep is that of 12 fragments, a step late, which its search chose.",
    rows=(*EVERY_METHOD, LIMIT),
    columns=tuple(column for task in TASKS for column in columns(task)),
    scales=("smoke",),
    draw=draw,
    tuned=True,
)
