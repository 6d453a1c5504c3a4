"""Table 2: language. GPT-2, TransNormerLLM and RoBERTa.

    make table2                                            all that is missing at scale=smoke
    python -m recipes run table2 --scale paper --launcher slurm

Cost: smoke, 63 runs of about 50 seconds on 2 cores, an hour. Paper: GPT-2 small on
OpenWebText takes some 4 days on 8 A100 for every run; nobody has run it here.
Expected at smoke scale: AllReduce is best, then Local SGD and kept progress, and on RoBERTa SlowMo
with them. CO2's perplexity is a tenth (RoBERTa) to seven tenths (GPT-2) above AllReduce's.
"""

from recipes.methods import METHODS
from recipes.recipe import Column, Recipe

SHORT = ("train.batch_size=4", "train.steps=480", "train.eval_every=120")
"""Half the batch and two thirds of the steps that conf has at smoke scale: a third of the time."""

RECIPE = Recipe(
    name="table2",
    title="Language",
    text="Validation perplexity; RoBERTa's is that of masked tokens.",
    rows=METHODS,
    columns=(
        Column("GPT-2", ("task=gpt2",), "final.perplexity", lower=True, smoke=SHORT),
        Column(
            "TransNormer-LLM", ("task=transnormer",), "final.perplexity", lower=True, smoke=SHORT
        ),
        Column("RoBERTa", ("task=roberta",), "final.perplexity", lower=True),
    ),
)
