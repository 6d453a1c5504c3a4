"""The trainings of 0/1 Adam's paper: RoBERTa in place of BERT, and ResNet-18 on ImageNet.

    python -m recipes run zero_one_training                all that is missing at scale=smoke

Cost at smoke scale: 30 runs of three quarters of a minute on 2 cores, 22 minutes. At scale=paper it
has the paper's schedules; what the paper does not say is as in published.py, which marks it.
The smoke schedules are the same curves over fewer steps.
Found (results/tables/zero_one_training.md): no method loses here, but 600 steps of RoBERTa only
reach the loss of the tokens' frequencies; zero_one_adam shows what comes after.
"""

from recipes.recipe import Column, Recipe, Row
from recipes.signs.published import TRAININGS

_ADAM = ("optim.name=adamw", "optim.betas=[0.9,0.999]")


def _bert(steps: int, warmup: int, stair: int, freeze: int) -> tuple[str, ...]:
    """Up to the peak in the warm-up, then × 0.99 in every stair."""
    return (
        f"train.steps={steps}",
        f"train.eval_every={steps}",
        f"optim.warmup_steps={warmup}",
        f"optim.decay_every={stair}",
        f"onebit_adam.freeze_step={freeze}",
        f"zero_one_adam.freeze_step={warmup}",
    )


def _imagenet(steps: int, freeze: int) -> tuple[str, ...]:
    """× 0.1 after each third."""
    return (
        f"train.steps={steps}",
        f"train.eval_every={steps}",
        f"optim.milestones=[{steps // 3},{2 * steps // 3}]",
        f"onebit_adam.freeze_step={freeze}",
        f"zero_one_adam.freeze_step={steps // 18}",
    )


_LARGE, _IMAGENET = TRAININGS["BERT-large"], TRAININGS["ImageNet"]
_ROBERTA = (
    "task=roberta",
    *_ADAM,
    "optim.schedule=exponential",
    "optim.decay_rate=0.99",
    "optim.lr=4e-4",
    "train.batch_size=32",
    "train.accumulate=16",  # 4096 windows with 8 workers
    *_bert(_LARGE.steps, _LARGE.warmup, 520, _LARGE.freeze_step),
)
_ROBERTA_SMOKE = ("optim.lr=2.5e-3", "train.accumulate=1", *_bert(600, 50, 2, 90))
_RESNET = (
    "task=resnet50",
    "resnet50.depth=18",
    *_ADAM,
    "optim.schedule=step",
    "optim.lr=1e-4",
    "optim.nesterov=false",
    "optim.warmup_steps=0",
    "train.batch_size=32",  # 256 images with 8 workers
    "train.accumulate=1",
    *_imagenet(_IMAGENET.steps, _IMAGENET.freeze_step),
)
_RESNET_SMOKE = ("optim.lr=3e-3", *_imagenet(1200, 180))

RECIPE = Recipe(
    name="zero_one_training",
    title="0/1 Adam's own trainings",
    text="RoBERTa stands for the paper's BERT, with its schedule: a linear warm-up, then × 0.99 in "
    "every stair; ResNet-18 learns with × 0.1 after each third. AdamW with betas of 0.9 and 0.999, "
    "and the same learning rate for all three.",
    rows=(
        Row("AllReduce", ("method=allreduce",)),
        Row("1-bit Adam", ("method=onebit_adam",)),
        Row("0/1 Adam", ("method=zero_one_adam",)),
    ),
    columns=(
        Column("RoBERTa: loss", _ROBERTA, "final.loss", lower=True, digits=3, smoke=_ROBERTA_SMOKE),
        Column(
            "ResNet-18: top-1, %", _RESNET, "final.top1", factor=100, digits=2, smoke=_RESNET_SMOKE
        ),
    ),
    seeds=(0, 1, 2, 3, 4),
    scales=("smoke", "paper"),
)
