"""RoBERTa pre-trained under several methods, then fine-tuned: what the encoder is worth.

    python -m recipes run glue                             all that is missing at scale=smoke

Cost: 20 trials of a third of a minute, 15 pre-trainings of three quarters of a minute and 36
fine-tunings of half a minute on 2 cores, 40 minutes; what zero_one_adam has run counts. A
fine-tuning starts from the folder of its pre-training, which is trained before it; on a cluster,
where all runs are queued at once, have the pre-trainings first.
Found (results/tables/glue.md): on adjoin pre-training helps, and the encoder of a method that ends
at a higher loss is worse; on topic no row is shown to differ from an encoder without
pre-training. 0/1 Adam's v is frozen after 15 % of the steps here, which may be too early
(zero_one_training).

Pre-training has the learning rate that won among as many for each method. Fine-tuning is the same
for all: AllReduce, with the settings of conf. So a row differs by the encoder alone, and the seed
of both trainings is the same.
"""

from dataclasses import dataclass, field
from pathlib import Path

from co2.record.folder import tag_from
from recipes.recipe import RUNS, Column, Row
from recipes.runs.cells import TrainCell
from recipes.signs.common import ROWS, STEPS, schedule, trials, trials_on
from recipes.tables.methods import PAPERS_GAP
from recipes.tuning.tuning import TunedRecipe

NEW = Row("no pre-training", ("method=allreduce",), limit=True)
METHODS = (
    *ROWS,
    PAPERS_GAP,
    Row("CO2, kept progress", ("method=co2_keep",)),
)
PRETRAINING = Column(
    "pre-training, loss",
    ("task=roberta", *schedule(STEPS)),
    "final.loss",
    lower=True,
    digits=4,
    without=(NEW.name,),
)
TRIAL = trials_on("roberta")


@dataclass(frozen=True)
class FineTuning(Column):
    """A column whose runs start from another column's run of the same row and seed."""

    before: Column = field(kw_only=True)

    def cell(self, recipe: str, row: Row, scale: str, seed: int) -> TrainCell:
        tuned = Row(row.name, ("method=allreduce",))
        if row != NEW:
            start = folder(self.before.cell(recipe, row, scale, seed))
            tuned = Row(row.name, ("method=allreduce", f"init_from={start}"))
        made = super().cell(recipe, tuned, scale, seed)
        assert isinstance(made, TrainCell)
        return made


def folder(cell: object) -> Path:
    """The folder of a run, without the time that composing its configuration takes."""
    assert isinstance(cell, TrainCell)
    words = dict(word.split("=", 1) for word in cell.overrides)
    tag = tag_from(cell.overrides, 1, 1, words["method"])
    return Path(RUNS, words["task"], words["method"], tag, f"seed{words['train.seed']}")


def accuracy(name: str) -> FineTuning:
    """The accuracy of one of the two tasks, in percent."""
    return FineTuning(
        f"{name}, accuracy %",
        ("task=glue", f"glue.name={name}"),
        "final.accuracy",
        factor=100,
        curve=False,
        before=PRETRAINING,
    )


COLUMNS = (PRETRAINING, accuracy("topic"), accuracy("adjoin"))
RECIPE = TunedRecipe(
    name="glue",
    title="Fine-tuning",
    text=f"RoBERTa pre-trained for {STEPS} steps under each method, with the learning rate that "
    "won in glue_trials and betas of 0.9 and 0.999, then fine-tuned under AllReduce. topic: which "
    "of six packages a passage is from; adjoin: whether two passages follow one another. Accuracy "
    "by chance is 16.67 % and 50 %. Kept progress sends the model whole, without momentum.",
    rows=(*METHODS, NEW),
    columns=COLUMNS,
    scales=("smoke",),
    grids={row.name: trials(row) for row in METHODS},
    tuned_in={column.name: TRIAL for column in COLUMNS},
)
