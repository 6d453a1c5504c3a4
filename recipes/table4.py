"""Table 4: what gap penalty and clip do on GPT-2, with a sweep of φ, which the paper lacks.

    make table4                                            all that is missing at scale=smoke
    python -m recipes run table4 --scale paper --launcher slurm

Cost: smoke, 27 runs of a minute and a half on 2 cores, 40 minutes.
The committed values are of 480 steps of 1.3 M parameters, and stay until their runs are made again.
There the perplexity without the gap penalty is twice as high. A constant penalty of 2, about what
the computed one comes to, does as well. φ = 0.001 holds training back; 0.03 and more clip nothing.
"""

from recipes.recipe import Column, Recipe, Row

PHI = (0.001, 0.003, 0.01, 0.03, 0.1)

RECIPE = Recipe(
    name="table4",
    title="Ablation: gap penalty and clip",
    text="CO2 on GPT-2 with τ = 12, validation perplexity. φ bounds every element of the outer "
    "momentum.",
    rows=(
        Row("CO2", ("method=co2",)),
        Row("CO2 without gap penalty", ("method=co2", "co2.gap_penalty=none")),
        Row("CO2, gap penalty by element", ("method=co2", "co2.gap_penalty=gap_aware_elementwise")),
        Row("CO2, constant gap 2", ("method=co2", "co2.gap_penalty=2")),
        *(Row(f"CO2, φ = {phi}", ("method=co2", f"co2.clip={phi}")) for phi in PHI),
    ),
    columns=(Column("GPT-2", ("task=gpt2",), "final.perplexity", lower=True),),
)
