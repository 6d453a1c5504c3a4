"""0/1 Adam beyond its quality: the paper's own trainings, when v is frozen, and seconds.

    python -m recipes run zero_one_training                        trainings and freeze
    sudo .venv/bin/python -m recipes run zero_one_training         seconds too, in the laboratory

Cost at smoke scale: 45 runs of three quarters of a minute and 24 of half a minute to three minutes
in the laboratory, an hour on 2 cores. At scale=paper it has the paper's schedules, with RoBERTa in
place of BERT and ResNet-18 on ImageNet; what the paper does not say is as in published.py, which
marks it. The smoke schedules are the same curves over fewer steps.
Found (results/tables/zero_one_training.md): when v of 0/1 Adam is frozen later RoBERTa ends lower
in the mean, of 1-bit Adam higher, none of it shown to differ from AllReduce; a mask below half of
the median costs. On slow links both methods take a fraction of AllReduce's time.
"""

from recipes.recipe import Column, Recipe, Row
from recipes.runs.laboratory import LabColumn
from recipes.signs.common import ROWS, STEPS, schedule
from recipes.signs.published import TRAININGS
from recipes.tables.methods import LIMIT

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
    "train.accumulate=1",
    *_bert(_LARGE.steps, _LARGE.warmup, 520, _LARGE.freeze_step),
)
_ROBERTA_SMOKE = ("optim.lr=2.5e-3", *_bert(600, 50, 2, 90))
_RESNET = (
    "task=resnet50",
    "resnet50.depth=18",
    *_ADAM,
    "optim.schedule=step",
    "optim.lr=1e-4",
    "optim.nesterov=false",
    "optim.warmup_steps=0",
    "train.batch_size=32",
    "train.accumulate=1",
    *_imagenet(_IMAGENET.steps, _IMAGENET.freeze_step),
)
_RESNET_SMOKE = ("optim.lr=3e-3", *_imagenet(1200, 180))


def _frozen(method: str, share: float) -> str:
    """The override that freezes v after this share of the steps."""
    return f"{method}.freeze_step={round(share * STEPS)}"


_ZERO_ONE, _ONE_BIT = "method=zero_one_adam", "method=onebit_adam"
VARIANTS = (
    Row("0/1 Adam, an exchange at every step", (_ZERO_ONE, "zero_one_adam.max_interval=1")),
    Row("0/1 Adam, v frozen after 30 %", (_ZERO_ONE, _frozen("zero_one_adam", 0.3))),
    Row("0/1 Adam, v frozen after 50 %", (_ZERO_ONE, _frozen("zero_one_adam", 0.5))),
    Row("0/1 Adam, masked below half of the median", (_ZERO_ONE, "zero_one_adam.mask_below=0.5")),
    Row("0/1 Adam, signs of the update", (_ZERO_ONE, "zero_one_adam.compress=update")),
    Row("1-bit Adam, v frozen after 50 %", (_ONE_BIT, _frozen("onebit_adam", 0.5))),
)
EVERY_ROW = (*ROWS, *VARIANTS, LIMIT)
NO_VARIANT = tuple(row.name for row in VARIANTS)
NO_LARGE = tuple(row.name for row in EVERY_ROW)
"""For columns that there are at scale=smoke only."""
LAB_STEPS, LINKS = 60, ("20", "100")

RECIPE = Recipe(
    name="zero_one_training",
    title="0/1 Adam, closely",
    text="Its own trainings: RoBERTa stands for the paper's BERT, with its schedule of a linear "
    "warm-up, then × 0.99 in every stair; ResNet-18 learns with × 0.1 after each third; one "
    f"learning rate for all. The freeze: RoBERTa, {STEPS} steps at a learning rate of 2e-3; v is "
    "frozen after 15 % of the steps where nothing else is said. Seconds: "
    f"{LAB_STEPS} steps of the laboratory's GPT-2, every worker on its own link; repeats stand "
    "in for seeds. Two workers, AdamW with betas of 0.9 and 0.999.",
    rows=EVERY_ROW,
    columns=(
        Column(
            "own trainings: RoBERTa loss",
            _ROBERTA,
            "final.loss",
            lower=True,
            digits=3,
            smoke=_ROBERTA_SMOKE,
            paper=("train.global_batch=4096",),
            without=(*NO_VARIANT, LIMIT.name),
            part="own trainings",
        ),
        Column(
            "own trainings: ResNet-18 top-1, %",
            _RESNET,
            "final.top1",
            factor=100,
            digits=2,
            smoke=_RESNET_SMOKE,
            paper=("train.global_batch=256",),
            without=(*NO_VARIANT, LIMIT.name),
            part="own trainings",
        ),
        Column(
            "freeze: RoBERTa loss",
            ("task=roberta", *schedule(STEPS), "optim.lr=2e-3"),
            "final.loss",
            lower=True,
            digits=4,
            without=(LIMIT.name,),
            without_large=NO_LARGE,
            part="freeze",
        ),
        *(
            LabColumn(
                f"seconds, {mbit} Mbit/s",
                ("--workers=2", f"--mbit={mbit}", *schedule(LAB_STEPS)),
                "train_s",
                lower=True,
                digits=1,
                curve=False,
                without=NO_VARIANT,
                without_large=NO_LARGE,
                part="seconds",
            )
            for mbit in LINKS
        ),
    ),
    scales=("smoke", "paper"),
)
