"""CO2 with kept progress beside AllReduce and DiLoCo, all tuned alike.

    python -m recipes tune gpt2 diloco co2_keep --tau 48   beforehand, and so for roberta and vit
    python -m recipes tune gpt2 co2_keep --average-moments --tau 48   with averaged moments
    python -m recipes run kept_progress --missing          what won, with every seed

Cost: 126 runs of a minute on 2 cores, some of them table1's and table2's: two hours. To tune takes
6 runs of a method for each task and τ.
Found (results/tables/kept_progress.md): on GPT-2 at τ = 12 kept progress loses no more than DiLoCo,
which waits; elsewhere it loses more, and its goal, 1 % from AllReduce, is missed everywhere.
Averaged moments are not shown to change anything. ViT's runs with two replicas are of another
kind of processor than those with four; losses of one seed differ by up to 28 % between such
(docs/results.md).

co2_keep has a delay of a whole round, conf's, so it is fully overlapped whenever any method can be.
Settings are those that won with two replicas, on a seed and on validation data that the table does
not show; trainings with four replicas have them too, with half of the samples for each.
"""

from collections.abc import Iterator

from co2.record.table import NOTHING, Table
from recipes.recipe import Column, Recipe, Row, Rows
from recipes.tables.methods import WITH_MOMENTS

SAMPLES = {"gpt2": 16, "roberta": 32, "vit": 64}
"""By task: those in a step of all replicas together."""
TAUS, REPLICAS = (12, 48), (2, 4)
"""The first of each are conf's own."""
ALLREDUCE = Row("AllReduce", ("method=allreduce",))
ROWS = (
    ALLREDUCE,
    Row("DiLoCo", ("method=diloco",)),
    Row("CO2, kept progress", ("method=co2_keep",)),
    WITH_MOMENTS,
)


def place(task: str, tau: int, replicas: int) -> str:
    """The name of the column for this task, τ and number of replicas."""
    return f"{task}, τ = {tau}, {replicas} replicas"


def words(task: str, tau: int, replicas: int) -> tuple[str, ...]:
    """The overrides of a training, with as many samples in a step for any number of replicas. What
    conf has is left to it, so that these runs are those of other tables, too."""
    found = [f"task={task}"]
    if tau != TAUS[0]:
        found += [f"{method}.tau={tau}" for method in ("diloco", "co2_keep")]
    if replicas != REPLICAS[0]:
        size = SAMPLES[task] // replicas
        found += [f"train.batch_size={size}", f"launch.workers={replicas}"]
    return tuple(found)


def column(task: str, tau: int, replicas: int) -> Column:
    """Validation loss."""
    return Column(
        place(task, tau, replicas),
        words(task, tau, replicas),
        "final.loss",
        lower=True,
        digits=4,
        curve=False,
        part=f"{replicas} replicas",
    )


def chosen(ours: Rows, _: Rows) -> Iterator[Table]:
    """What was tuned: the settings of every method, task and τ."""
    heads = {(task, tau): f"{task}, τ = {tau}" for task in SAMPLES for tau in TAUS}
    run = {(line["row"], line["column"]) for line in ours}
    lines = []
    for row in ROWS:
        places = [(row.name, place(task, tau, REPLICAS[0])) for task, tau in heads]
        if any(where in run for where in places):
            found = (settings(ours, *where) if where in run else NOTHING for where in places)
            lines.append((row.name, *found))
    if lines:
        yield Table(
            name="kept_progress_settings",
            title="Kept progress: settings",
            text="What won with two replicas.",
            head=("method", *heads.values()),
            rows=lines,
        )


def settings(ours: Rows, row: str, column_name: str) -> str:
    """What was tuned for a row, from the comments of its runs' commands."""
    line = next(line for line in ours if (line["row"], line["column"]) == (row, column_name))
    _, _, tuned = line["command"].partition("#")
    words = [word.partition(".")[2].replace("=", " ") for word in tuned.split()]
    return ", ".join(words) or NOTHING


RECIPE = Recipe(
    name="kept_progress",
    title="Kept progress beside AllReduce and DiLoCo",
    text="Validation loss after as many samples, each method with the settings that won for its "
    "task and τ with two replicas. co2_keep's delay is τ: what it sends has a whole round to "
    "arrive. Averaged moments cost three times the bytes.",
    rows=ROWS,
    columns=tuple(
        column(task, tau, replicas) for task in SAMPLES for tau in TAUS for replicas in REPLICAS
    ),
    scales=("smoke",),
    beside=chosen,
    tuned=True,
)
