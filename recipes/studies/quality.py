"""What every task learns at smoke scale, beside what it must reach.

    python -m recipes run quality                          the runs of table1 and table2

Cost: none beside those tables.
Found (results/tables/quality.md): every method reaches every goal with every seed, but for CO2 and
CoCoD-SGD on ViT. Waiting for data takes less than 2 % of the time, but for ViT under CO2.

Seeds differ in weights, data order, augmentation and masks, not in validation data.
"""

from collections.abc import Callable, Iterator

from co2.record.table import Table
from recipes.recipe import Column, Recipe, Rows
from recipes.runs.cells import SummaryJSON
from recipes.tables.methods import ADAM_ONLY, ALL_ROWS, STEADY_GAP


def of_entropy(summary: SummaryJSON) -> float | None:
    """Validation loss as a share of the unigram entropy, what a model of frequencies alone has."""
    loss = summary["final"]["loss"]
    return None if loss is None else float(loss / summary["baselines"]["unigram_entropy"])


ENTROPY = "loss, % of unigram entropy"
Metric = str | Callable[[SummaryJSON], float | None]
GOALS: dict[str, tuple[str, Metric, float]] = {
    "ResNet-50, top-1 %": ("resnet50", "final.top1", 90),
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
        without = ADAM_ONLY if task == "resnet50" else ()
        yield Column(
            name,
            (f"task={task}",),
            metric,
            factor=100,
            lower=metric is of_entropy,
            curve=False,
            part="metric of the task",
            without=without,
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


def reached(ours: Rows, _: Rows) -> Iterator[Table]:
    """How many seeds of every method reach the goal of every task."""
    lines = []
    for name, (_task, metric, goal) in GOALS.items():
        for row in RECIPE.rows:
            place = (row.name, name)
            values = [float(r["value"]) for r in ours if (r["row"], r["column"]) == place]
            if values:
                less = metric is of_entropy
                count = sum(value < goal if less else value >= goal for value in values)
                sign = "<" if less else "≥"
                lines.append((name, row.name, f"{sign} {goal}", f"{count} of {len(values)}"))
    if lines:
        yield Table(
            name="quality_reached",
            title="Quality: seeds that reach the goal",
            text="A goal tells a training that works from one that does not.",
            head=("task", "method", "goal", "reached"),
            rows=lines,
        )


RECIPE = Recipe(
    name="quality",
    title="What every task learns",
    text="Two workers, embedded or generated data, every method with the settings that won in its "
    "trials. No more than 2 % of training time should be spent waiting for batches, which is "
    "measured under AllReduce and CO2: batches are made alike under all methods.",
    rows=ALL_ROWS,
    columns=tuple(columns()),
    scales=("smoke",),
    beside=reached,
    tuned=True,
)
