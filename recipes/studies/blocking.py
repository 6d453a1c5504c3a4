"""Blocking starts, and rounds of unequal length, on RoBERTa.

    python -m recipes run blocking                         all that is missing

Cost: 15 runs of a minute on 2 cores beside table2's, a quarter of an hour.
Found (results/tables/blocking.md): a blocking start of a tenth or of a quarter ruins CO2 with the
same two seeds of three. Rounds of unequal length are not shown to change anything.

The same on GPT-2, with learning rates of its own, is in recipe rounds.
"""

from recipes.recipe import Column, Recipe, Row
from recipes.studies.rounds import CO2, CO2_KEEP, LOCAL_SGD, VARIANTS

RECIPE = Recipe(
    name="blocking",
    title="Blocking starts and rounds of unequal length",
    text="RoBERTa, two workers, 300 rounds of τ = 12, validation loss; every variant with the "
    "settings that won in the trials of its method.",
    rows=(
        Row("AllReduce", ("method=allreduce",)),
        LOCAL_SGD,
        CO2,
        CO2_KEEP,
        *(row for row, base in VARIANTS.items() if base in (LOCAL_SGD, CO2, CO2_KEEP)),
    ),
    columns=(Column("RoBERTa", ("task=roberta",), "final.loss", lower=True, digits=4),),
    scales=("smoke",),
    tuned=True,
)
