"""What fragments hide: kept progress in 1, 4 and 12 parts on links that a mean fills for a round.

    sudo .venv/bin/python -m recipes run fragments         in the laboratory

Cost: 21 trainings of half a minute to three minutes on 2 cores: a quarter of an hour.

What they cost in steps is in recipe rounds.
"""

from collections.abc import Iterator
from dataclasses import replace

from co2.record.table import Table
from recipes.recipe import Recipe, Rows
from recipes.runs.laboratory import LabColumn
from recipes.studies.rounds import CO2, CO2_KEEP, FRAGMENTS, LOCAL_SGD
from recipes.tables import shares
from recipes.tables.methods import LIMIT

PART = "2 workers"
RATE = "20 Mbit/s"
THROUGHPUT = LabColumn(
    f"{PART}, {RATE}",
    ("--workers=2", "--mbit=20"),
    "throughput",
    digits=0,
    curve=False,
    part=PART,
)
WAITING = replace(
    THROUGHPUT,
    name=f"{PART}, waiting for communication %, {RATE}",
    metric="exposed_share",
    lower=True,
    factor=100,
    digits=1,
    without=(LIMIT.name,),
    part=f"{PART}, waiting for communication %",
)


def tables(ours: Rows, _: Rows) -> Iterator[Table]:
    """Shares of the limit."""
    yield from shares.tables(RECIPE, ours)


RECIPE = Recipe(
    name="fragments",
    title="Fragments on a slow link",
    text="Tokens per second of both workers, and the share of the time in which worker 0 waits, on "
    "table3's GPT-2 and links, where a mean of the model takes most of a round of τ = 12. Repeats "
    "stand in for seeds; each has every method before the next begins.",
    rows=(LOCAL_SGD, CO2, CO2_KEEP, *FRAGMENTS, LIMIT),
    columns=(THROUGHPUT, WAITING),
    seeds=(0, 1, 2),
    scales=("smoke",),
    beside=tables,
    undisturbed=True,
)
