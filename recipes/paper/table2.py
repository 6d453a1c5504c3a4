"""Table 2: language. GPT-2, TransNormerLLM and RoBERTa.

    make table2                                            all that is missing at scale=smoke
    python -m recipes run table2 --scale paper --launcher slurm

Cost: smoke, 120 runs of a minute on 2 cores, two hours. Paper: GPT-2 small on
OpenWebText takes some 4 days on 8 A100 for every run; nobody has run it here.
Every method has what won in 12 trials of its own (`python -m recipes tune`).
Found: on GPT-2 blocking Local SGD ends 1.7 % above AllReduce, and of the overlapped methods kept
progress 1.4 %, Overlap-Local-SGD 3, CO2 5, CoCoD-SGD 7 %. On RoBERTa Local SGD is 7 % above, kept
progress 11, the other overlapped ones 16 to 29 %. Averaged moments, which are three times the
bytes, change nothing in kept progress on any of the three. On TransNormer it is .9 % [.4, 1.4]
above, with them .8 [.1, 1.5], SlowMo 1.3, Local SGD 1.8, CO2 2.3 %, and five seeds tell CO2
neither from Local SGD nor from Overlap-Local-SGD.
"""

from functools import partial

from recipes.recipe import Column, Recipe
from recipes.tables.methods import ALL_ROWS

loss = partial(Column, metric="final.loss", lower=True, digits=4, curve=False, part="loss")
perplexity = partial(Column, metric="final.perplexity", lower=True, part="perplexity")

RECIPE = Recipe(
    name="table2",
    title="Language",
    text="Validation cross-entropy and perplexity; RoBERTa's are of masked tokens.",
    rows=ALL_ROWS,
    columns=(
        loss("GPT-2, loss", ("task=gpt2",)),
        loss("TransNormer-LLM, loss", ("task=transnormer",)),
        loss("RoBERTa, loss", ("task=roberta",)),
        perplexity("GPT-2", ("task=gpt2",)),
        perplexity("TransNormer-LLM", ("task=transnormer",)),
        perplexity("RoBERTa", ("task=roberta",)),
    ),
    seeds=(0, 1, 2, 3, 4),
    tuned=True,
)
