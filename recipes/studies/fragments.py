"""What a method costs on slow links, with kept progress whole and in 4 and 12 fragments.

    sudo .venv/bin/python -m recipes run fragments         in the laboratory

Cost: 108 trainings of 20 seconds to two minutes on 2 cores, a quarter of an hour a repeat (--seeds
6: the first). Its waits and speeds stand beside the steps of recipe rounds in the headline table
and figure, because all methods have run on one processor, in turn.
Found (results/tables/fragments.md): where a mean takes three quarters of a round or less, CO2 and
kept progress hardly wait, whole or in fragments; where it takes longer than one, these wait alike.
"""

from collections.abc import Iterator
from dataclasses import replace

from co2.record.table import Table
from recipes.paper.table3 import on_links
from recipes.recipe import Recipe, Row, Rows
from recipes.studies.rounds import FRAGMENTS, TWELVE, VARIANTS
from recipes.tables import shares
from recipes.tables.methods import LIMIT, METHODS

SEEDS = (6, 7, 8)
"""Of repeats that table3 does not have, so that all rows are of the same hours."""


def in_rounds(row: Row) -> Row:
    """The row with its settings of recipe rounds."""
    own, *_ = FRAGMENTS[VARIANTS.get(row, row)]
    return replace(row, overrides=(*row.overrides, *own))


ONE_STEP_LATE = tuple(row for row, base in VARIANTS.items() if base is TWELVE)


def tables(ours: Rows, _: Rows) -> Iterator[Table]:
    """Shares of the limit."""
    yield from shares.tables(RECIPE, ours)


RECIPE = Recipe(
    name="fragments",
    title="Fragments on a slow link",
    text="Tokens per second of both workers, and the share of the time in which worker 0 waits, on "
    "table3's GPT-2 and links. Repeats stand in for seeds; each has every method before the next "
    "begins. Kept progress that is sent whole has no momentum; fragments have the settings that "
    "they have in rounds.",
    rows=(*METHODS, *map(in_rounds, (*FRAGMENTS, *ONE_STEP_LATE)), LIMIT),
    columns=tuple(on_links(("20", "40", "100"))),
    seeds=SEEDS,
    scales=("smoke",),
    beside=tables,
    undisturbed=True,
)
