"""Kept progress beside what waits and beside Streaming DiLoCo, on 2 and 4 replicas.

    python -m recipes tune gpt2 local_sgd diloco streaming_diloco co2_keep    beforehand; and so for
                                                           roberta: 10 minutes for each method
    python -m recipes run kept_progress --missing          what won, with every seed

Cost: 72 runs of a minute or two on 2 cores, some of them table2's: two hours.
Found (results/tables/kept_progress.md): on GPT-2 co2_keep in 12 fragments loses less than Local
SGD, which waits, and with two replicas it is not shown to lose anything. On RoBERTa it loses less
than Local SGD, and with the κ and w that won more than AllReduce. Without momentum, at Local SGD's
rate, it is not shown to differ from Local SGD. Four replicas of RoBERTa have not run.

Settings are those that won with two replicas, on a seed and on validation data that the table does
not show; the number of fragments is one of them. Trainings with four replicas have them too, with
half of the samples for each.
"""

from collections.abc import Iterator

from co2.record.table import NOTHING, Table
from recipes.recipe import Column, Recipe, Row, Rows

SAMPLES = {"gpt2": 16, "roberta": 32}
"""By task: those in a step of all replicas together."""
REPLICAS = (2, 4)
"""The first is conf's own."""
TUNED = (
    Row("AllReduce", ("method=allreduce",)),
    Row("Local SGD", ("method=local_sgd",)),
    Row("DiLoCo", ("method=diloco",)),
    Row("Streaming DiLoCo", ("method=streaming_diloco",)),
    Row("CO2, kept progress", ("method=co2_keep",)),
)
OTHERS = tuple(
    Row(
        f"{TUNED[-1].name}, κ = 0.5, w = {w}",
        (*TUNED[-1].overrides, "co2_keep.keep_local=0.5", f"co2_keep.momentum_weight={w}"),
    )
    for w in ("0.1", "0")
)
"""At the learning rate that won: with conf's κ and w, and without momentum. Two replicas alone."""
RATE = {"gpt2": "0.008", "roberta": "0.003536"}
"""By task: the learning rate that won for AllReduce and for Local SGD."""
AT_THEIRS = {
    task: Row(f"{OTHERS[-1].name}, rate {rate}", (*OTHERS[-1].overrides, f"optim.lr={rate}"))
    for task, rate in RATE.items()
}
"""Without momentum, at the rate of the methods that have none. Of this task, two replicas alone."""


def place(task: str, replicas: int) -> str:
    """The name of the column for this task and number of replicas."""
    return f"{task}, {replicas} replicas"


def words(task: str, replicas: int) -> tuple[str, ...]:
    """The overrides of a training, with as many samples in a step for any number of replicas. What
    conf has is left to it, so that these runs are those of other tables, too."""
    if replicas == REPLICAS[0]:
        return (f"task={task}",)
    size = SAMPLES[task] // replicas
    return (f"task={task}", f"train.batch_size={size}", f"launch.workers={replicas}")


def column(task: str, replicas: int) -> Column:
    """Validation loss."""
    taken = (*OTHERS, AT_THEIRS[task]) if replicas == REPLICAS[0] else ()
    return Column(
        place(task, replicas),
        words(task, replicas),
        "final.loss",
        lower=True,
        digits=4,
        curve=False,
        part=f"{replicas} replicas",
        without=tuple(row.name for row in (*OTHERS, *AT_THEIRS.values()) if row not in taken),
    )


def chosen(ours: Rows, _: Rows) -> Iterator[Table]:
    """What was tuned: the settings of every method and task."""
    lines = []
    for row in TUNED:
        found = [settings(ours, row.name, place(task, REPLICAS[0])) for task in SAMPLES]
        if any(one != NOTHING for one in found):
            lines.append((row.name, *found))
    if lines:
        yield Table(
            name="kept_progress_settings",
            title="Kept progress: settings",
            text="What won with two replicas.",
            head=("method", *SAMPLES),
            rows=lines,
        )


def settings(ours: Rows, row: str, column_name: str) -> str:
    """What was tuned for a row, from the comments of its runs' commands."""
    commands = (
        line["command"] for line in ours if (line["row"], line["column"]) == (row, column_name)
    )
    _, _, tuned = next(commands, "").partition("#")
    words = [word.partition(".")[2].replace("=", " ") for word in tuned.split()]
    return ", ".join(words) or NOTHING


RECIPE = Recipe(
    name="kept_progress",
    title="Kept progress beside AllReduce and DiLoCo",
    text="Validation loss after as many samples, τ = 12, each method with the settings that won "
    "for its task with two replicas, but for the κ, w and rate that a row names. What `co2_keep` "
    "and Streaming DiLoCo send has as many steps to arrive as lie between two fragments. What "
    "that hides was timed for other settings of both (fragments).",
    rows=(*TUNED, *OTHERS, *AT_THEIRS.values()),
    columns=tuple(column(task, replicas) for replicas in REPLICAS for task in SAMPLES),
    scales=("smoke",),
    beside=chosen,
    tuned=True,
)
