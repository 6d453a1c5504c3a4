"""Time on a slow link to the loss that AllReduce ends at on an unlimited one.

    sudo python -m recipes run time_to_loss                in the laboratory

Cost: 8 trainings of one to three minutes on 2 cores, 15 minutes.
Expected: on links of 20 Mbit/s co2_keep reaches the loss in about the time that AllReduce takes
without a limit, with a schedule of twice the steps; no method does with as many steps.

Every training decays its learning rate over its own steps, so a longer one is ahead of a shorter
one at the same step of its second half.
"""

from functools import partial
from pathlib import Path

from co2.lab.measurement import time_to_loss
from recipes.cells import SummaryJSON
from recipes.laboratory import LabColumn
from recipes.recipe import Recipe, Row

RATE = "--mbit=20"
FIRST = "AllReduce, unlimited"


def training(name: str, method: str, *settings: str, steps: int = 480, every: int = 24) -> Row:
    """A row. `every` is the steps between evaluations, which find the time to within so many."""
    words = (f"train.steps={steps}", f"train.eval_every={every}", *settings)
    return Row(name, (f"method={method}", *words))


def seconds_to(summary: SummaryJSON, first: SummaryJSON) -> float | None:
    """Seconds of training to the final loss of the first row; infinite if it is never reached."""
    reached = time_to_loss(Path(summary["folder"]), first["final"]["loss"])
    return float("inf") if reached is None else reached


def ratio_to(summary: SummaryJSON, first: SummaryJSON) -> float | None:
    """These seconds as a multiple of what the first row trains."""
    reached = seconds_to(summary, first)
    return None if reached is None else reached / float(first["train_s"])


column = partial(
    LabColumn,
    overrides=("--workers=2", RATE, "gpt2.eval_samples=64"),
    lower=True,
    curve=False,
)
"""A column that reads the same trainings."""
KEEP = ("co2_keep.tau=12", "co2_keep.delay=8", "co2_keep.momentum_weight=0", "comm.dtype=bf16")
"""On the slow link a mean takes fourteen steps in fp32 and seven in bf16."""

RECIPE = Recipe(
    name="time_to_loss",
    title="Time to AllReduce's loss on a slow link",
    text=f"GPT-2, two workers, one run each. The loss is that at which {FIRST}, ends; the others "
    "have links of 20 Mbit/s. Seconds are of training, without evaluations, which find the time to "
    "within 24 or 40 steps. Every training decays its learning rate over its own steps. "
    "results/field/time_to_loss.md has the figures of an earlier measurement.",
    rows=(
        training(FIRST, "allreduce", "--mbit=unlimited"),
        training("local SGD, τ = 48", "local_sgd", "local_sgd.tau=48"),
        training(
            "DiLoCo, τ = 48",
            "diloco",
            *("diloco.tau=48", "diloco.outer_lr=1", "diloco.outer_momentum=0.4"),
        ),
        training("CO2, τ = 48", "co2", "co2.tau=48"),
        training(
            "co2_keep, τ = 48",
            "co2_keep",
            *("co2_keep.tau=48", "co2_keep.delay=16", "co2_keep.momentum_weight=0"),
        ),
        *(
            training(
                f"co2_keep, τ = 12, bf16, {steps} steps", "co2_keep", *KEEP, steps=steps, every=40
            )
            for steps in (680, 760, 960)
        ),
    ),
    columns=(
        column("seconds to the loss", metric="train_s", of=FIRST, compare=seconds_to, digits=0),
        column("ratio to AllReduce's seconds", metric="train_s", of=FIRST, compare=ratio_to),
        column("seconds of training", metric="train_s", digits=0),
        column("exposed, % of training", metric="exposed_share", factor=100, digits=1),
        column("validation loss", metric="final.loss", digits=3, curve=True),
    ),
    seeds=(0,),
    scales=("smoke",),
    undisturbed=True,
)
