"""Table 4: what gap penalty and clip do on GPT-2, with a sweep of φ, which the paper lacks.

    make table4                                            its trials, then what won in them
    python -m recipes run table4 --scale paper --launcher slurm

Cost: smoke, 3 trials and 36 runs of two minutes on 2 cores, an hour and a quarter.
Found (results/tables/table4.md): with β = 0.2 and α = 1 CO2 needs a gap penalty, a constant one or
one that does not fade with the learning rate; no clip is shown to help.

All rows have one learning rate, the best of three for the first row, because an ablation changes
one thing. It favours that row; the recipe gap gives every setting a rate of its own.
"""

from recipes.recipe import Column, Row
from recipes.tuning.tuning import TunedRecipe, at_rates, trial_column

PHI = (0.001, 0.003, 0.01, 0.03, 0.1)
RATES = ("4e-3", "8e-3", "1.6e-2")
GAP_AWARE = ("method=co2", "co2.gap_penalty=gap_aware")
"""conf has gap_aware_steady, because of this table and the recipe gap."""
CO2 = Row("CO2", GAP_AWARE)
ROWS = (
    CO2,
    Row("CO2 without gap penalty", ("method=co2", "co2.gap_penalty=none")),
    Row("CO2, gap penalty by element", ("method=co2", "co2.gap_penalty=gap_aware_elementwise")),
    *(
        Row(
            f"CO2, constant gap 2, β = {beta}",
            ("method=co2", "co2.gap_penalty=2", f"co2.outer_momentum={beta}"),
        )
        for beta in (0, 0.2, 0.4)
    ),
    Row("CO2, gap_aware_steady", ("method=co2", "co2.gap_penalty=gap_aware_steady")),
    *(Row(f"CO2, φ = {phi}", (*GAP_AWARE, f"co2.clip={phi}")) for phi in PHI),
)
COLUMN = Column("GPT-2", ("task=gpt2",), "final.perplexity", lower=True)

RECIPE = TunedRecipe(
    name="table4",
    title="Ablation: gap penalty and clip",
    text="CO2 on GPT-2 with τ = 12, validation perplexity, all rows at the best of three learning "
    "rates for the first (table4_trials). That row and those of φ have `gap_aware`. With a "
    "constant gap of 2, β + α/Λ is 0.5, 0.7 and 0.9 here (docs/choosing.md); without one it is "
    "1.2. φ bounds every element of the outer momentum.",
    rows=ROWS,
    columns=(COLUMN,),
    grids={row.name: at_rates(CO2, RATES) for row in ROWS},
    tuned_in={COLUMN.name: trial_column("GPT-2", ("task=gpt2",))},
)
