"""What every task learns at smoke scale, beside what it must reach.

    python -m recipes run quality                          the runs of table1 and table2

Cost: none beside those tables.
results/tables/quality.md says which seeds reach their goal, and what waiting for data takes.

Seeds differ in weights, data order, augmentation and masks, not in validation data.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

from co2.record.table import Table
from recipes.recipe import Column, Recipe, Rows
from recipes.runs.cells import SummaryJSON
from recipes.tables import layout
from recipes.tables.entries import by_seed
from recipes.tables.methods import ALL_ROWS, STEADY_GAP


def of_entropy(summary: SummaryJSON) -> float | None:
    """Validation loss as a share of the unigram entropy, what a model of frequencies alone has."""
    loss = summary["final"]["loss"]
    return None if loss is None else float(loss / summary["baselines"]["unigram_entropy"])


ENTROPY = "loss, % of unigram entropy"
Metric = str | Callable[[SummaryJSON], float | None]
GOALS: dict[str, tuple[str, Metric, float]] = {
    "ViT, top-1 %": ("vit", "final.top1", 90),
    "ADE20K, mIoU %": ("ade20k", "final.miou", 60),
    "ShapeNet, SVM accuracy %": ("shapenet", "final.svm_accuracy", 90),
    f"GPT-2, {ENTROPY}": ("gpt2", of_entropy, 100),
    f"RoBERTa, {ENTROPY}": ("roberta", of_entropy, 100),
    f"TransNormer-LLM, {ENTROPY}": ("transnormer", of_entropy, 100),
}
"""By column: task, metric, and the value to reach; losses must stay below theirs."""


def columns() -> Iterator[Column]:
    """For each task its metric, and the share of training time spent waiting for batches.

    Batches are made alike under every method, so waiting is measured under the first, and under
    CO2, which waits for nothing else.
    """
    others = tuple(row.name for row in ALL_ROWS if row.name not in ("AllReduce", STEADY_GAP.name))
    for name, (task, metric, _) in GOALS.items():
        yield Column(
            name,
            (f"task={task}",),
            metric,
            factor=100,
            lower=metric is of_entropy,
            curve=False,
            part="metric of the task",
        )
        yield Column(
            f"{name.partition(',')[0]}, waiting for data %",
            (f"task={task}",),
            "data_share",
            factor=100,
            lower=True,
            curve=False,
            part="waiting for data %",
            without=others,
        )


def tables(ours: Rows, _: Rows) -> Iterator[Table]:
    """How many seeds of every method reach each goal, and the waiting for data."""
    values = by_seed(ours)
    cells: dict[layout.Place, str] = {}
    waiting: dict[layout.Place, str] = {}
    heads = {
        column: f"{column} {'<' if metric is of_entropy else '≥'} {goal}"
        for column, (_, metric, goal) in GOALS.items()
    }
    for (row, column), seeds in values.items():
        if column in GOALS:
            metric, goal = GOALS[column][1:]
            less = metric is of_entropy
            count = sum(value < goal if less else value >= goal for value in seeds.values())
            cells[row, heads[column]] = f"{count} of {len(seeds)}"
        else:
            waiting[row, column.partition(",")[0]] = f"{statistics.fmean(seeds.values()):.1f}"
    rows = [row.name for row in ALL_ROWS]
    if cells:
        yield replace(
            layout.grid(cells, rows, list(heads.values())),
            name="quality_reached",
            title="Seeds that reach the goal",
            text="A goal tells a training that works from one that does not.",
        )
    if waiting:
        yield replace(
            layout.grid(waiting, rows, [column.partition(",")[0] for column in GOALS]),
            name="quality_waiting",
            title="Waiting for data, % of training",
            text="Batches are made alike under all methods; under CO2 a worker waits for nothing "
            "else. Means over the seeds.",
        )


RECIPE = Recipe(
    name="quality",
    title="What every task learns",
    text="Two workers, embedded or generated data, every method with the settings that won in its "
    "trials. The metrics themselves are those of table1 and table2.",
    rows=ALL_ROWS,
    columns=tuple(columns()),
    scales=("smoke",),
    beside=tables,
    listed=False,
    tuned=True,
)
