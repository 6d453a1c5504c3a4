"""Time on a slow link to the loss that AllReduce ends at on an unlimited one.

    sudo .venv/bin/python -m recipes run time_to_loss      in the laboratory: trials, then winners

Cost: 67 trials and 21 trainings of half a minute to 6 on 2 cores, an hour and a half.
Found (results/tables/time_to_loss.md): on a slow link AllReduce needs many times as long as without
a limit; co2_keep, which its search sends in 12 fragments, and Overlap-Local-SGD are ahead of Local
SGD, CO2 is not shown to be.

Every method on the slow link has the same rights. Its learning rate and knobs are those that won in
its 12 trials on the task (conf/tuned/gpt2, for τ = 12 and 3,600 steps). The trials here try for
each fp32 and bf16 on the wire, τ = 12 and 48, and a schedule as long as that of the first row, half
as long again, and twice as long. AllReduce has no τ. The trials' trainings have half of the steps,
on a seed and on validation data that the table does not show; what reached the loss soonest there
is trained.

Every training decays its learning rate over its own steps, so a longer one is ahead of a shorter
one at the same step of its second half.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

from co2.record.table import NOTHING, Table
from co2_measure.lab.measurement import time_to_loss
from recipes.recipe import Row, Rows
from recipes.runs.cells import SummaryJSON
from recipes.runs.laboratory import LabColumn
from recipes.tables.methods import STEADY_GAP
from recipes.tuning.tuning import TUNING, TUNING_SEED, TunedRecipe

FIRST = Row("AllReduce, unlimited", ("method=allreduce", "--mbit=unlimited"))
ALLREDUCE = Row("AllReduce", ("method=allreduce",))
METHODS = (
    Row("Local SGD", ("method=local_sgd",)),
    Row("DiLoCo", ("method=diloco",)),
    Row("Overlap-Local-SGD", ("method=overlap_local_sgd",)),
    STEADY_GAP,
    Row("CO2, kept progress", ("method=co2_keep",)),
)
STEPS = 960
"""Of the first row."""
LENGTHS, DTYPES, TAUS = ("1", "1.5", "2"), ("fp32", "bf16"), (12, 48)


def seconds_to(summary: SummaryJSON, first: SummaryJSON) -> float | None:
    """Seconds of training to the final loss of the first row; infinite if it is never reached."""
    reached = time_to_loss(Path(summary["folder"]), first["final"]["loss"])
    return float("inf") if reached is None else reached


def ratio_to(summary: SummaryJSON, first: SummaryJSON) -> float | None:
    """These seconds as a multiple of what the first row trains."""
    reached = seconds_to(summary, first)
    return None if reached is None else reached / float(first["train_s"])


def trials_of(row: Row) -> tuple[Row, ...]:
    """A row for each setting that is tried of a method."""
    method = row.overrides[0].partition("=")[2]
    found = []
    for tau, dtype, length in product((None,) if row == ALLREDUCE else TAUS, DTYPES, LENGTHS):
        words = (f"comm.dtype={dtype}", f"train.steps=×{length}", f"optim.warmup_steps=×{length}")
        name = ", ".join((row.name, *([f"τ = {tau}"] if tau else []), dtype, f"× {length} steps"))
        own = (f"{method}.tau={tau}",) if tau else ()
        found.append(Row(name, (*row.overrides, *words, *own)))
    return tuple(found)


def training(steps: int, *words: str) -> tuple[str, ...]:
    """The overrides of a training whose schedule has so many steps, where a row has no longer one.

    Evaluations find the time to within 24 steps.
    """
    return (
        "--workers=2",
        "--mbit=20",
        "task=gpt2",
        "gpt2.eval_samples=256",
        f"train.steps={steps}",
        f"optim.warmup_steps={steps // 24}",
        "train.eval_every=24",
        *words,
    )


def settings(ours: Rows, _: Rows) -> Iterator[Table]:
    """What every row is trained with, as the commands of its runs have it."""
    commands = {line["row"]: line["command"].split() for line in ours}
    lines = []
    for own in RECIPE.rows:
        if own.name in commands:
            words = (word.partition("=") for word in commands[own.name] if "=" in word)
            given = {key.rpartition(".")[2]: value for key, _, value in words}
            found = (given.get(key, NOTHING) for key in ("tau", "steps", "lr"))
            lines.append((own.name, given.get("dtype", "fp32"), *found))
    if lines:
        yield Table(
            name="time_to_loss_settings",
            title="Time to AllReduce's loss on a slow link: settings",
            text="Type on the wire, τ and steps as they won in time_to_loss_trials; the inner "
            "learning rate is the task's tuned one.",
            head=("method", "on the wire", "τ", "steps", "learning rate"),
            rows=lines,
        )


column = partial(
    LabColumn,
    overrides=training(STEPS),
    lower=True,
    curve=False,
    tuned_for="gpt2",
    seeded=True,
)
"""A column that reads the same trainings."""
COLUMNS = (
    column("seconds to the loss", metric="train_s", of=FIRST.name, compare=seconds_to, digits=0),
    column("ratio to AllReduce's seconds", metric="train_s", of=FIRST.name, compare=ratio_to),
    column("seconds of training", metric="train_s", digits=0),
    column("exposed, % of training", metric="exposed_share", factor=100, digits=1),
    column("validation loss", metric="final.loss", digits=3, curve=True),
)
TRIAL = column(
    "seconds to the loss",
    overrides=training(STEPS // 2, *TUNING, f"train.seed={TUNING_SEED}"),
    metric="train_s",
    of=FIRST.name,
    compare=seconds_to,
    digits=0,
    seeded=False,
)
RECIPE = TunedRecipe(
    name="time_to_loss",
    title="Time to AllReduce's loss on a slow link",
    text=f"GPT-2, two workers. The loss is that at which {FIRST.name}, ends after "
    f"{STEPS} steps; the others have links of 20 Mbit/s, and the type on the wire, τ and length of "
    "schedule that reached it soonest in time_to_loss_trials. Every method has the learning rate "
    "and the knobs that won in its 12 trials on the task; co2_keep is sent in 12 fragments, as won "
    "there. Every seed is held "
    "against the first row's of the same seed. Seconds are of training, without evaluations, which "
    "find the time to within 24 steps.",
    rows=(FIRST, ALLREDUCE, *METHODS),
    columns=COLUMNS,
    seeds=(0, 1, 2),
    scales=("smoke",),
    grids={row.name: trials_of(row) for row in (ALLREDUCE, *METHODS)},
    tuned_in={column.name: TRIAL for column in COLUMNS},
    trial_seed=0,  # the repeat's
    goal=FIRST,
    undisturbed=True,
    beside=settings,
)
