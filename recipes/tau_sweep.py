"""CO2 against τ: quality, overlap and throughput.

    make tau_sweep                                         all that is missing at scale=smoke
    python -m recipes run tau_sweep --scale paper --launcher slurm

Cost: smoke, 27 runs of about 45 seconds on 2 cores, 20 minutes.
Expected at smoke scale: perplexity rises with τ; from 96 on a training has five rounds and less.
"""

from recipes.recipe import Column, Recipe, Row
from recipes.table2 import SHORT

TAUS = (1, 3, 6, 12, 24, 48, 96, 192)
GPT2 = ("task=gpt2",)

RECIPE = Recipe(
    name="tau_sweep",
    title="CO2 against τ",
    text="GPT-2 on the local network of one machine. Tokens per second of all workers.",
    rows=(
        Row("AllReduce", ("method=allreduce",)),
        *(Row(f"CO2, τ = {tau}", ("method=co2", f"co2.tau={tau}")) for tau in TAUS),
    ),
    columns=(
        Column("perplexity", GPT2, "final.perplexity", lower=True, smoke=SHORT),
        Column("overlap, %", GPT2, "overlap", factor=100, smoke=SHORT, curve=False),
        Column("tokens/s", GPT2, "throughput", digits=0, smoke=SHORT, curve=False),
    ),
)
