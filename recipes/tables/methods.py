"""The rows of tables that compare methods."""

from co2.catalogue import CATALOGUE
from recipes.recipe import Row

STEADY_GAP = Row("CO2, steady gap", ("method=co2",))
"""Ours, the default."""
PAPERS_GAP = Row("CO2, paper's gap", ("method=co2", "co2.gap_penalty=gap_aware"))
METHODS = (
    Row("AllReduce", ("method=allreduce",)),
    Row("Local SGD", ("method=local_sgd",)),
    Row("SlowMo", ("method=slowmo",)),
    Row("Overlap-Local-SGD", ("method=overlap_local_sgd",)),
    Row("CoCoD-SGD", ("method=cocod_sgd",)),
    STEADY_GAP,
    Row("CO2, kept progress", ("method=co2_keep",)),
)
"""The methods of the CO2 paper's tables and ours. Throughput does not depend on the gap."""
WITH_MOMENTS = Row(
    "CO2, kept progress and moments", ("method=co2_keep", "co2_keep.average_moments=true")
)
"""At three times the bytes of the others: AdamW's two moments travel with the weights."""
LOSS_ROWS = (*METHODS[:-2], PAPERS_GAP, *METHODS[-2:])
"""Rows of the headline table of losses, by the names of results/paper.csv."""
ALL_ROWS = (*LOSS_ROWS, WITH_MOMENTS)
"""Rows of the tables of losses."""
RELEASED = Row("CO2, released code", ("method=co2_released",))
"""What the authors' code computes, with its τ of 48: SlowMo that waits."""
SLOWMO_TAU48 = Row("SlowMo, τ = 48", ("method=slowmo", "slowmo.tau=48"))
"""What that is compared with."""
ROW_NOTES = (
    "The paper's gap is our reading of it, and no row clips. "
    "Kept progress is sent as its search on the task chose, whole or in fragments; a fragment is "
    "one step late, the whole model and CO2's mean are a round late."
)
"""What the names of rows do not say, for the texts of table1 and table2."""
EVERY_METHOD = tuple(Row(name, (f"method={name}",)) for name in CATALOGUE)
"""All methods with their default settings, by the names of `method=`."""
ADAM_ONLY = ("desloc", "mt_dao", "onebit_adam", "zero_one_adam", WITH_MOMENTS.name)
"""Rows that no task with SGD can be run with."""
KEPT_WHOLE = ("co2_keep.fragments=1", "co2_keep.momentum_weight=0")
"""In a column: what its rows of `co2_keep` have, unless they say otherwise."""
LIMIT = Row("no communication", ("method=none",), limit=True)
"""The laboratory's bound of all methods: the same training without communication."""
