"""1-bit Adam and 0/1 Adam beside AllReduce: what they send over one schedule, and what they learn.

    make zero_one_adam                                     all that is missing at scale=smoke

Cost: 9 runs of a minute and a half on 2 cores, 14 minutes; three of them are table2's. It runs at
scale=smoke only, because the freeze and the growth of the intervals are shares of that schedule.
Expected: 1-bit Adam sends a sixth of AllReduce's bytes, and 0/1 Adam half of that in less than half
of the rounds. v is frozen after 15 % of the steps; in longer trainings that part weighs less. The
committed values are of 480 steps of a GPT-2 with 1.3 M parameters, and stay until it runs again.
"""

from functools import partial

from recipes.cells import SummaryJSON
from recipes.recipe import Column, Recipe, Row

MIB = 2**20
STEPS = 3600
"""The steps of conf at smoke scale."""
FREEZE = round(0.15 * STEPS)
DOUBLE = round(0.14 * STEPS)


def volume(summary: SummaryJSON) -> float:
    """MiB that one worker sends in the whole training."""
    return summary["bytes_per_step"] * summary["steps"] / MIB


def rounds(summary: SummaryJSON) -> float:
    """Exchanges of a training. AllReduce has one at every step and does not count them."""
    return float(summary["rounds"] if "rounds" in summary else summary["steps"])


sent = partial(Column, overrides=("task=gpt2",), lower=True, curve=False)
"""A column about what is sent."""

RECIPE = Recipe(
    name="zero_one_adam",
    title="What Adam sends in signs",
    text="The signs are the update's (compress=update), not the momentum's as in the papers; "
    "results/onebit_mask.md compares the two. "
    "GPT-2 with AdamW; v is frozen after 15 % of the steps in both variants, and the intervals of "
    "0/1 Adam double every 14 % of them after that, up to 16. Volume is what one worker sends; a "
    "round is a time that the replicas exchange anything. The paper's shares are of trainings many "
    "times as long, at best.",
    rows=(
        Row("AllReduce", ("method=allreduce",)),
        Row(
            "1-bit Adam",
            (
                "method=onebit_adam",
                f"onebit_adam.freeze_step={FREEZE}",
                "onebit_adam.compress=update",
            ),
        ),
        Row(
            "0/1 Adam",
            (
                "method=zero_one_adam",
                f"zero_one_adam.freeze_step={FREEZE}",
                f"zero_one_adam.double_every={DOUBLE}",
                "zero_one_adam.compress=update",
            ),
        ),
    ),
    columns=(
        sent("volume, MiB", metric=volume, digits=1),
        sent("volume, % of 1-bit Adam's", metric=volume, digits=1, of="1-bit Adam"),
        sent("rounds", metric=rounds, digits=0),
        sent("rounds, % of 1-bit Adam's", metric=rounds, digits=1, of="1-bit Adam"),
        Column("loss", ("task=gpt2",), "final.loss", lower=True, digits=4),
    ),
    scales=("smoke",),
)
