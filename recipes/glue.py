"""RoBERTa pre-trained under several methods, then fine-tuned: what the encoder is worth.

    python -m recipes run glue                             all that is missing at scale=smoke

Cost: 51 runs of a minute or two on 2 cores, an hour and a half; the 15 pre-trainings are runs of
quality. A fine-tuning starts from the folder of its pre-training, which is
trained before it; on a cluster, where all runs are queued at once, have the pre-trainings first.
Expected: every method's encoder is better than a new one. Not yet run.

Fine-tuning is the same for all: AllReduce, with the settings of conf. So a row differs by the
encoder alone, and the seed of both trainings is the same.
"""

from dataclasses import dataclass, field
from pathlib import Path

from co2.record.folder import tag_from
from recipes.cells import TrainCell
from recipes.recipe import RUNS, Column, Recipe, Row

NEW = Row("no pre-training", ("method=allreduce",), limit=True)

PRETRAINING = Column(
    "pre-training, perplexity",
    ("task=roberta",),
    "final.perplexity",
    lower=True,
    without=(NEW.name,),
)


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


RECIPE = Recipe(
    name="glue",
    title="Fine-tuning",
    text="RoBERTa pre-trained under each method, then fine-tuned under AllReduce. topic: which "
    "of six packages a passage is from; adjoin: whether two passages follow one another. Accuracy "
    "by chance is 16.67 % and 50 %.",
    rows=(
        Row("AllReduce", ("method=allreduce",)),
        Row("1-bit Adam", ("method=onebit_adam",)),
        Row("0/1 Adam", ("method=zero_one_adam",)),
        Row("CO2", ("method=co2",)),
        Row("CO2, kept progress", ("method=co2_keep",)),
        NEW,
    ),
    columns=(PRETRAINING, accuracy("topic"), accuracy("adjoin")),
    scales=("smoke",),
)
