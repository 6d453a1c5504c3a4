"""A small recipe whose runs the workers of one job make in turn, and a program that is one of them.

Run as a program: `job_workers.py`, with the environment of a worker of torchrun.
"""

import sys

from recipes.paper import table3
from recipes.recipe import Recipe, Row
from recipes.tables.methods import LIMIT

TOY = ("task=toy", "launch.backend=gloo", "toy.delay_s=0.002")
WORLDS = (1, 2, 4)
RECIPE = Recipe(
    name="rehearsed",
    title="Rehearsed",
    text="Text.",
    rows=(Row("AllReduce", ("method=allreduce",)), Row("CO2", ("method=co2", "co2.tau=3")), LIMIT),
    columns=tuple(table3.at_scale("Toy", TOY, WORLDS, "smoke")),
    seeds=(0, 1),
    undisturbed=True,
)

if __name__ == "__main__":
    from recipes.__main__ import run  # here: Python warns where it is imported and then run

    sys.exit(run([RECIPE], "smoke", None, "local"))
