"""What decides how 0/1 Adam ends on RoBERTa: variants of its two schedules.

    python -m recipes run zero_one_why                     all that is missing

Cost: 27 runs of half a minute to a minute on 2 cores; twenty minutes.
Found (results/tables/zero_one_why.md): when v is frozen decides; longer intervals and the signs of
the update change little.

All have one learning rate, which is not the best of each method: see zero_one_adam.
"""

from recipes.recipe import Column, Recipe, Row
from recipes.signs.common import STEPS, schedule

RATE = "optim.lr=2e-3"


def frozen(method: str, share: float) -> str:
    """The override that freezes v after this share of the steps."""
    return f"{method}.freeze_step={round(share * STEPS)}"


RECIPE = Recipe(
    name="zero_one_why",
    title="What decides how 0/1 Adam ends on RoBERTa",
    text=f"RoBERTa, {STEPS} steps, two workers, a learning rate of 2e-3 and betas of 0.9 and 0.999 "
    "for all. v is frozen after 15 % of the steps where nothing else is said.",
    rows=(
        Row("AllReduce", ("method=allreduce", RATE)),
        Row("0/1 Adam", ("method=zero_one_adam", RATE)),
        Row(
            "0/1 Adam, an exchange at every step",
            ("method=zero_one_adam", RATE, "zero_one_adam.max_interval=1"),
        ),
        Row(
            "0/1 Adam, v frozen after 30 %",
            ("method=zero_one_adam", RATE, frozen("zero_one_adam", 0.3)),
        ),
        Row(
            "0/1 Adam, v frozen after 50 %",
            ("method=zero_one_adam", RATE, frozen("zero_one_adam", 0.5)),
        ),
        Row(
            "0/1 Adam, masked below half of the median",
            ("method=zero_one_adam", RATE, "zero_one_adam.mask_below=0.5"),
        ),
        Row(
            "0/1 Adam, signs of the update",
            ("method=zero_one_adam", RATE, "zero_one_adam.compress=update"),
        ),
        Row("1-bit Adam", ("method=onebit_adam", RATE)),
        Row(
            "1-bit Adam, v frozen after 50 %",
            ("method=onebit_adam", RATE, frozen("onebit_adam", 0.5)),
        ),
    ),
    columns=(
        Column("loss", ("task=roberta", *schedule(STEPS)), "final.loss", lower=True, digits=4),
    ),
    scales=("smoke",),
)
