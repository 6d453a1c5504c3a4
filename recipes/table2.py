"""Table 2: language. GPT-2, TransNormerLLM and RoBERTa.

    make table2                                            all that is missing at scale=smoke
    python -m recipes run table2 --scale paper --launcher slurm

Cost: smoke, 63 runs of about 50 seconds on 2 cores, an hour. Paper: GPT-2 small on
OpenWebText is some 4 days on 8 A100 for every run; nobody has run it here.
Expected at smoke scale: AllReduce first, then Local SGD and kept progress, with SlowMo beside them
on RoBERTa; CO2's perplexity is a tenth (RoBERTa) to seven tenths (GPT-2) above AllReduce's.
"""

from recipes.methods import METHODS
from recipes.recipe import Column, Recipe

# Half the batches and two thirds of the steps of conf's smoke recipes: a third of the time.
SHORT = ("train.batch_size=4", "train.steps=480", "train.eval_every=120")

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
