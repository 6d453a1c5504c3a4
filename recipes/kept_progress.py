"""CO2 with kept progress beside the best blocking method: validation loss after as many samples.

    python -m recipes run kept_progress                    its trials first, then what won in them

Cost: 72 trials and some 240 runs of one to two minutes on 2 cores, eight hours.
Expected, as shorter trainings had it: on the language tasks co2_keep is within 1 % of the better of
DiLoCo and SlowMo, on ViT it is not. With a delay of a whole round it is 1 to 4 % above them on the
language tasks.

Every method is tuned over a grid of its own, as large as the others', with seed 0 and two replicas,
for every task and τ: that is the recipe kept_progress_trials. What wins there is trained with every
seed, and with four replicas too. AllReduce has nothing to tune.
"""

import statistics
from collections.abc import Iterator

from co2.record.table import NOTHING, Table, mean_text
from recipes.recipe import Column, Recipe, Row, Rows
from recipes.tuning import TunedRecipe

TASKS = {
    "gpt2": (16, 3600),
    "roberta": (32, 3600),
    "resnet50": (64, 3000),
    "vit": (64, 2400),
}
"""Samples in a step of all replicas together, and steps: those of conf at smoke scale with two
workers, as everything else."""
TAUS, REPLICAS = (12, 48), (2, 4)
GRIDS = {
    "diloco": (
        ("outer_lr=1", "outer_momentum=0"),
        ("outer_lr=1", "outer_momentum=0.4"),
        ("outer_lr=0.7", "outer_momentum=0.9"),
    ),
    "slowmo": (
        ("outer_lr=1", "outer_momentum=0.2"),
        ("outer_lr=1", "outer_momentum=0.5"),
        ("outer_lr=1", "outer_momentum=0.7"),
    ),
    "co2_keep": (
        ("outer_momentum=0", "momentum_weight=0"),
        ("outer_momentum=0.5", "momentum_weight=0.2"),
        ("outer_momentum=0.8", "momentum_weight=0.2"),
    ),
}
WHOLE = "co2_keep, delay τ"
"""Has the settings that won with a delay of a quarter of τ."""
BLOCKING = ("diloco", "slowmo")
GOAL = 0.01


def place(task: str, tau: int, replicas: int) -> str:
    """The name of the column for this task, τ and number of replicas."""
    return f"{task}, τ = {tau}, {replicas} replicas"


def column(task: str, tau: int, replicas: int) -> Column:
    """Validation loss. co2_keep has a delay of a quarter of a round, unless a row has another."""
    samples, steps = TASKS[task]
    return Column(
        place(task, tau, replicas),
        (
            f"task={task}",
            *(f"{method}.tau={tau}" for method in GRIDS),
            f"co2_keep.delay={tau // 4}",
            f"train.batch_size={samples // replicas}",
            f"train.steps={steps}",
            f"train.eval_every={steps}",
            f"launch.workers={replicas}",
            "checkpoint.every=0",
        ),
        "final.loss",
        lower=True,
        digits=4,
        curve=False,
        part=f"{replicas} replicas",
    )


def trials_of(method: str) -> tuple[Row, ...]:
    """A row for each point of a method's grid."""
    return tuple(
        Row(
            f"{method}, {', '.join(point).replace('=', ' ')}",
            (f"method={method}", *(f"{method}.{word}" for word in point)),
        )
        for point in GRIDS[method]
    )


def differences(ours: Rows, _: Rows) -> Iterator[Table]:
    """What every method loses to the better of the blocking ones, seed by seed."""
    lines = []
    for where in RECIPE.columns:
        found: dict[str, dict[str, float]] = {row.name: {} for row in RECIPE.rows}
        for line in ours:
            if line["column"] == where.name:
                found[line["row"]][line["seed"]] = float(line["value"])
        rivals = [found[name] for name in BLOCKING if found[name]]
        bound = min(rivals, key=lambda losses: statistics.mean(losses.values()), default={})
        for row in RECIPE.rows:
            losses = found[row.name]
            if losses:
                words = "the bound" if losses is bound else difference(losses, bound)
                chosen = settings(ours, row.name, where.name)
                values = mean_text(list(losses.values()))
                lines.append((where.name, row.name, chosen, values, str(len(losses)), words))
    if lines:
        yield Table(
            name="kept_progress_differences",
            title="Kept progress: differences to the better blocking method",
            text="The difference is to the same seeds of the better of DiLoCo and SlowMo, as a "
            f"share of its mean loss (goal: at most {GOAL:.0%}).",
            head=("task", "method", "setting", "validation loss", "seeds", "difference"),
            rows=lines,
        )


def difference(losses: dict[str, float], bound: dict[str, float]) -> str:
    """Mean ± standard deviation of the differences to the same seeds, as a share of the bound."""
    pairs = [(losses[seed], bound[seed]) for seed in losses.keys() & bound.keys()]
    if not pairs:
        return NOTHING
    whole = statistics.mean(theirs for _, theirs in pairs)
    return mean_text([(own - theirs) / whole for own, theirs in pairs], ".1%", sign="+")


def settings(ours: Rows, row: str, column_name: str) -> str:
    """What was chosen for a row in its trials, from the commands of its runs."""
    line = next(line for line in ours if (line["row"], line["column"]) == (row, column_name))
    words = [word.partition(".")[2] for word in line["command"].split()]
    tuned = ("outer_lr=", "outer_momentum=", "momentum_weight=")
    return ", ".join(word.replace("=", " ") for word in words if word.startswith(tuned)) or NOTHING


TRIALS = Recipe(
    name="kept_progress_trials",
    title="Kept progress: trials",
    text="Validation loss of every setting in the grids of the recipe kept_progress, which takes "
    "the best of each method for every task and τ. Two replicas.",
    rows=tuple(trial for method in GRIDS for trial in trials_of(method)),
    columns=tuple(column(task, tau, 2) for task in TASKS for tau in TAUS),
    seeds=(0,),
    scales=("smoke",),
)

RECIPE = TunedRecipe(
    name="kept_progress",
    title="Kept progress beside blocking methods",
    text="Validation loss after as many samples, each method with the settings that won in "
    f"kept_progress_trials ({len(GRIDS['co2_keep'])} settings each, seed 0, two replicas). "
    "co2_keep's delay is a quarter of τ, so it overlaps fully if a collective takes no more than "
    "τ/4 steps; with a delay of τ, whenever any method can. results/kept_progress.md has the "
    "figures of an earlier measurement.",
    rows=(
        Row("allreduce", ("method=allreduce",)),
        *(Row(method, (f"method={method}",)) for method in GRIDS),
        Row(WHOLE, ("method=co2_keep", "co2_keep.delay=null")),
    ),
    columns=tuple(
        column(task, tau, replicas) for task in TASKS for tau in TAUS for replicas in REPLICAS
    ),
    scales=("smoke",),
    beside=differences,
    trials=TRIALS,
    grids={
        **{method: tuple(row.name for row in trials_of(method)) for method in GRIDS},
        WHOLE: tuple(row.name for row in trials_of("co2_keep")),
    },
    tuned_in={
        place(task, tau, replicas): place(task, tau, 2)
        for task in TASKS
        for tau in TAUS
        for replicas in REPLICAS
    },
)
