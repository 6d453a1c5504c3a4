"""Table 2: language. GPT-2, TransNormerLLM and RoBERTa.

    make table2                                            all that is missing at scale=smoke
    python -m recipes run table2 --scale paper --launcher slurm

Cost: smoke, 145 runs of a minute on 2 cores, two hours. Paper: docs/reproduce.md; nobody has run
it here.
Every method has what won in 12 trials of its own (`python -m recipes tune`); of the paper's gap:
`python -m recipes tune gpt2 co2 --gap-penalty gap_aware`.
Found (results/tables/table2.md): kept progress loses least of the overlapped methods; averaged
moments are not shown to gain anything on language. The authors' released code, which waits, ends
near SlowMo at its τ.
"""

from functools import partial

from recipes.recipe import Column, Recipe
from recipes.tables.methods import ALL_ROWS, RELEASED, ROW_NOTES, SLOWMO_TAU48

loss = partial(Column, metric="final.loss", lower=True, digits=4, curve=False, part="loss")
perplexity = partial(Column, metric="final.perplexity", lower=True, part="perplexity")
_GPT2_ALONE = (RELEASED.name, SLOWMO_TAU48.name)
_FOUR_NODES = ("launch.workers=32",)
"""A node has one replica of the 7B model."""

RECIPE = Recipe(
    name="table2",
    title="Language",
    text="Validation cross-entropy and perplexity; RoBERTa's are of masked tokens. " + ROW_NOTES,
    rows=(*ALL_ROWS, RELEASED, SLOWMO_TAU48),
    columns=(
        loss("GPT-2, loss", ("task=gpt2",)),
        loss(
            "TransNormer-LLM, loss", ("task=transnormer",), paper=_FOUR_NODES, without=_GPT2_ALONE
        ),
        loss("RoBERTa, loss", ("task=roberta",), without=_GPT2_ALONE),
        perplexity("GPT-2", ("task=gpt2",)),
        perplexity(
            "TransNormer-LLM", ("task=transnormer",), paper=_FOUR_NODES, without=_GPT2_ALONE
        ),
        perplexity("RoBERTa", ("task=roberta",), without=_GPT2_ALONE),
    ),
    seeds=(0, 1, 2, 3, 4),
    tuned=True,
)
