"""The paper's headline case in small: a ResNet under SGD with momentum, on Fashion-MNIST.

    python -m tasks.prepare fashion_mnist                  beforehand, seconds
    python -m recipes run fashion                          its trials, then what won in them

Cost on 2 cores: with two replicas 64 trials of half a minute and 35 runs of 75 seconds, an hour and
a quarter; with eight, estimated, four hours.
Found (results/tables/fashion.md): with two replicas and three seeds all methods lie within a point,
and none is shown to differ. Eight replicas have not run.
Expected: an independent simulation (four replicas, images of 14×14) found Local SGD 1.8 points
below SGD after 100 rounds, CO2 3.6 points after 100 and 1.0 after 300.

The smoke ResNet trains 300 rounds of 12 steps, 3.8 epochs, with 64 images in a step of all replicas
together. Every method takes the best of four learning rates, and those that have an outer rate α
the best of every pair with four of these: four trials or sixteen. The other settings are conf's,
such as β = 0.5 of SlowMo, β = 0.2 of CO2, and of co2_keep κ = 0.5 and 12 fragments with w = 0.1,
or the whole model with w = 0. A trial has a third of the steps and the same schedule. It counts
what the table shows, images told wrong, on half of the test images; the table has the other half.
"""

from itertools import product

from recipes.recipe import FASHION_MNIST, Column, Row
from recipes.runs.cells import SummaryJSON
from recipes.tables.methods import KEPT_WHOLE
from recipes.tuning.tuning import TUNING, TunedRecipe, at_rates

STEPS, TRIAL_STEPS = 3600, 1200
GLOBAL_BATCH = 64
REPLICAS = (2, 8)
RATES = ("0.025", "0.05", "0.1", "0.2")
OUTER_RATES = ("0.3", "0.5", "0.7", "1")
"""α."""
DEFAULTS = Row("CO2, kept progress, defaults", ("method=co2_keep",))
"""In 12 fragments."""
PLAIN = (
    Row("AllReduce", ("method=allreduce",)),
    Row("Local SGD", ("method=local_sgd",)),
    Row("CO2, kept progress", ("method=co2_keep", *KEPT_WHOLE)),
    DEFAULTS,
)
OUTER = (
    Row("SlowMo", ("method=slowmo",)),
    Row("CO2, paper's gap", ("method=co2", "co2.gap_penalty=gap_aware")),
    Row("CO2, steady gap", ("method=co2", "co2.gap_penalty=gap_aware_steady")),
)
"""Rows with an outer rate."""


def words(replicas: int, steps: int, evaluations: int) -> tuple[str, ...]:
    """The overrides of a training."""
    return (
        "task=resnet50",
        *FASHION_MNIST["resnet50"],
        f"launch.workers={replicas}",
        f"train.batch_size={GLOBAL_BATCH // replicas}",
        f"train.global_batch={GLOBAL_BATCH}",
        f"train.steps={steps}",
        f"train.eval_every={steps // evaluations}",
        f"optim.warmup_steps={steps // 20}",
        "checkpoint.every=0",
    )


def errors(summary: SummaryJSON) -> float | None:
    """Images of which a wrong class is told, in percent; None for a training that diverged."""
    found = summary["final"]["top1"]
    return None if found is None else 100 * (1 - found)


def column(replicas: int) -> Column:
    """Top-1 in percent, whose differences are points."""
    found = words(replicas, STEPS, 4)
    return Column(f"top-1, %, {replicas} replicas", found, "final.top1", factor=100)


def trials_of(replicas: int) -> Column:
    """Errors of the trials."""
    found = (*words(replicas, TRIAL_STEPS, 1), *TUNING)
    return Column(f"errors, %, {replicas} replicas", found, errors, lower=True, curve=False)


def with_outer_rates(row: Row) -> tuple[Row, ...]:
    """A trial of the row for each pair of rates."""
    method = row.overrides[0].partition("=")[2]
    return tuple(
        Row(f"{trial.name}, α {outer}", (*trial.overrides, f"{method}.outer_lr={outer}"))
        for trial, outer in product(at_rates(row, RATES), OUTER_RATES)
    )


RECIPE = TunedRecipe(
    name="fashion",
    title="ResNet under SGD on Fashion-MNIST",
    text=f"Top-1 after {STEPS} steps of {GLOBAL_BATCH} images of all replicas together, τ = 12, "
    "SGD with a momentum of 0.9, on half of the test images. Each row has the learning rate, and "
    "the outer rate if it has one, that won in fashion_trials on the other half.",
    rows=(*PLAIN[:2], *OUTER, *PLAIN[2:]),
    columns=tuple(map(column, REPLICAS)),
    seeds=(0, 1, 2, 3, 4),
    scales=("smoke",),
    grids={row.name: at_rates(row, RATES) for row in PLAIN}
    | {row.name: with_outer_rates(row) for row in OUTER},
    tuned_in={column(replicas).name: trials_of(replicas) for replicas in REPLICAS},
)
