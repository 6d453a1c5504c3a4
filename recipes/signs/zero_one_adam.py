"""1-bit Adam and 0/1 Adam beside AllReduce: what they learn and send, each at its own rate.

    make zero_one_adam                                     its trials, then what won in them

Cost: 36 trials of a third of a minute and 30 runs of three quarters of a minute to a minute on 2
cores, 40 minutes. It runs at scale=smoke only, because the freeze is a share of that schedule.
Found (results/tables/zero_one_adam.md): with a fraction of the bytes, 1-bit Adam's loss on GPT-2 is
not shown to differ from AllReduce's, and 0/1 Adam's is above it in all seeds, by a percent or so.
On GPT-2 the highest rate won for AllReduce and for 0/1 Adam, so a higher one may be
better still.

Every method takes what won among as many trials as the others have, over half of the steps, on a
seed and on validation data that the table does not show. On RoBERTa, whose loss stands still at
that of the tokens' frequencies for hundreds of steps, the trials of the signs include a later
freeze, which zero_one_training has in full. No trial there has left that loss, so they know little
of which setting ends best: AllReduce's winner is 4e-3, and in the whole training 2e-3 does as well
(zero_one_training). Trainings end amid the fall that follows.
"""

from functools import partial

from recipes.recipe import Column, Row
from recipes.runs.cells import SummaryJSON, rounds
from recipes.signs.common import ALLREDUCE, ROWS, STEPS, schedule, trials, trials_on
from recipes.tuning.tuning import TunedRecipe, at_rates

MIB = 2**20
TASKS = ("gpt2", "roberta")
RATES_BETWEEN = ("1.4e-3", "2.8e-3", "5.6e-3", "1.1e-2")


def volume(summary: SummaryJSON) -> float:
    """MiB that one worker sends in the whole training."""
    return summary["bytes_per_step"] * summary["steps"] / MIB


def columns(task: str) -> list[Column]:
    """Loss, volume and rounds of one task, of the same runs."""
    words = (f"task={task}", *schedule(STEPS))
    column = partial(Column, overrides=words, lower=True, part=task)
    sent = partial(column, curve=False)
    return [
        column(f"{task}: loss", metric="final.loss", digits=4),
        sent(f"{task}: volume, MiB", metric=volume, digits=1),
        sent(f"{task}: volume, % of 1-bit Adam's", metric=volume, digits=1, of="1-bit Adam"),
        sent(f"{task}: rounds", metric=rounds, digits=0),
        sent(f"{task}: rounds, % of 1-bit Adam's", metric=rounds, digits=1, of="1-bit Adam"),
    ]


def further_trials(row: Row) -> tuple[Row, ...]:
    """As many trials again, for RoBERTa: v frozen later, and for AllReduce the rates between."""
    if row == ALLREDUCE:
        return at_rates(row, RATES_BETWEEN)
    node = row.overrides[0].partition("=")[2]
    return tuple(
        Row(f"{trial.name}, v frozen later", (*trial.overrides, f"{node}.freeze_step=×2"))
        for trial in trials(row)
    )


PER_TASK = {task: columns(task) for task in TASKS}
FURTHER = tuple(trial for row in ROWS for trial in further_trials(row))
TRIALS = {
    "gpt2": trials_on("gpt2", tuple(trial.name for trial in FURTHER)),
    "roberta": trials_on("roberta"),
}
RECIPE = TunedRecipe(
    name="zero_one_adam",
    title="What Adam sends in signs",
    text=f"AdamW with betas of 0.9 and 0.999, {STEPS} steps, two workers; v is frozen after 15 % "
    "of them, on RoBERTa after 30 % where that won. The intervals of 0/1 Adam follow the learning "
    "rate, up to 16. Each method has what won in zero_one_adam_trials: of four learning rates, on "
    "RoBERTa of eight settings. Volume is what one worker sends; a round is a time that the "
    "replicas exchange anything. zero_one_training has the seconds, and zero_one_volume the "
    "paper's shares: of trainings many times as long, at best.",
    rows=ROWS,
    columns=tuple(column for found in PER_TASK.values() for column in found),
    seeds=(0, 1, 2, 3, 4),
    scales=("smoke",),
    grids={row.name: (*trials(row), *further_trials(row)) for row in ROWS},
    tuned_in={column.name: TRIALS[task] for task, found in PER_TASK.items() for column in found},
)
