"""What fragments hide: kept progress in 1, 4 and 12 parts on links that a mean fills for a round.

    sudo .venv/bin/python -m recipes run fragments         in the laboratory

Cost: 72 trainings of half a minute on 2 cores, 13 minutes a repeat (--seeds 6: the first).
Found (results/tables/fragments.md, three repeats): `co2_keep` is not shown to wait longer in
fragments than whole; in 12 it waits for 4 % of the time where a mean takes a whole round. What
fragments save in steps is in recipe rounds.
"""

from collections.abc import Iterator

from co2.record.table import Table
from recipes.paper.table3 import on_links
from recipes.recipe import Recipe, Rows
from recipes.studies.rounds import CO2, CO2_KEEP, FRAGMENTS, LOCAL_SGD, TWELVE, VARIANTS
from recipes.tables import shares
from recipes.tables.methods import LIMIT

SEEDS = (6, 7, 8)
"""Of repeats that table3 does not have, so that all rows are of the same hours."""

ONE_STEP_LATE = tuple(row for row, base in VARIANTS.items() if base is TWELVE)


def tables(ours: Rows, _: Rows) -> Iterator[Table]:
    """Shares of the limit."""
    yield from shares.tables(RECIPE, ours)


RECIPE = Recipe(
    name="fragments",
    title="Fragments on a slow link",
    text="Tokens per second of both workers, and the share of the time in which worker 0 waits, on "
    "table3's GPT-2 and links: of 20 Mbit/s, where a mean of the model takes about a round of "
    "τ = 12, of 30, where it takes two thirds of one, and of 100. Repeats stand in for seeds; each "
    "has every method before the next begins. Kept progress has no momentum here.",
    rows=(LOCAL_SGD, CO2, CO2_KEEP, *FRAGMENTS, *ONE_STEP_LATE, LIMIT),
    columns=tuple(on_links(("20", "30", "100"))),
    seeds=SEEDS,
    scales=("smoke",),
    beside=tables,
    undisturbed=True,
)
