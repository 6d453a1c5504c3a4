"""The rows of the tables that compare methods, by the names of results/paper.csv."""

from recipes.recipe import Row

METHODS = (
    Row("AllReduce", ("method=allreduce",)),
    Row("Local SGD", ("method=local_sgd",)),
    Row("SlowMo", ("method=slowmo",)),
    Row("Overlap-Local-SGD", ("method=overlap_local_sgd",)),
    Row("CoCoD-SGD", ("method=cocod_sgd",)),
    Row("CO2", ("method=co2",)),
    Row("CO2, kept progress", ("method=co2_keep", "co2_keep.delay=3")),
)
