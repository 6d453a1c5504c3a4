"""The best learning rate of every method as the number of replicas grows, at one total batch.

    python -m recipes run rates                            all that is missing

Cost: 80 runs of 25 seconds on 2 cores, and longer where 8 workers share them: an hour. 8 workers
hold 7 GB.
Found (results/tables/rates.md): the best rates of all four methods and of 1 to 8 replicas lie
within a third of each other. We had expected local methods to want up to √G times AllReduce's rate,
because a local replica's gradient is √G noisier.

One seed, on the validation data for tuning: nothing here is reported as a method's quality.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from co2.record.table import NOTHING, Table
from recipes.recipe import Column, Recipe, Row, Rows
from recipes.tables import figures
from recipes.tables.entries import by_seed
from recipes.tables.methods import KEPT_WHOLE, PAPERS_GAP
from recipes.tuning.tuning import TUNING, TUNING_SEED, at_rates

RATES = ("2e-3", "4e-3", "8e-3", "1.6e-2", "3.2e-2")
REPLICAS = (1, 2, 4, 8)
SAMPLES = 16
"""In a step of all replicas together."""
STEPS = 1200
METHODS = (
    Row("AllReduce", ("method=allreduce",)),
    Row("Local SGD", ("method=local_sgd",)),
    PAPERS_GAP,
    Row("CO2, kept progress", ("method=co2_keep",)),
)


def column(replicas: int) -> Column:
    """Validation loss with so many replicas."""
    settings = (
        f"launch.workers={replicas}",
        f"train.batch_size={SAMPLES // replicas}",
        f"train.steps={STEPS}",
        f"train.eval_every={STEPS}",
        f"optim.warmup_steps={STEPS // 24}",
        "checkpoint.every=0",
        *KEPT_WHOLE,
    )
    return Column(
        name(replicas),
        ("task=gpt2", *settings, *TUNING),
        "final.loss",
        lower=True,
        digits=4,
        curve=False,
    )


def name(replicas: int) -> str:
    """The name of the column for so many replicas."""
    return f"{replicas} replicas" if replicas > 1 else "1 replica"


def losses(ours: Rows, method: Row, replicas: int) -> dict[float, float]:
    """By learning rate."""
    values = by_seed(ours)
    return {
        float(rate): loss
        for rate, trial in zip(RATES, at_rates(method, RATES), strict=True)
        for loss in values.get((trial.name, name(replicas)), {}).values()
    }


def optimum(found: Mapping[float, float]) -> float | None:
    """The best learning rate, by losses at those that were tried.

    It is the bottom of the parabola in the rate's logarithm through the best three: the rate with
    the lowest loss and its neighbours. None if that rate has no neighbour on one side.
    """
    rates = sorted(found)
    at = rates.index(min(rates, key=found.__getitem__)) if rates else 0
    if not 0 < at < len(rates) - 1:
        return None
    three = rates[at - 1 : at + 2]
    square, linear, _ = np.polyfit(np.log(three), [found[rate] for rate in three], 2)
    return math.exp(-linear / (2 * square))


def optima(ours: Rows, _: Rows) -> Iterator[Table]:
    """The best rate of every method and number of replicas, beside √G."""
    lines = []
    for replicas in REPLICAS:
        first: float | None = None
        for method in METHODS:
            found = losses(ours, method, replicas)
            best = optimum(found)
            first = best if method is METHODS[0] else first
            ratio = NOTHING if best is None or first is None else f"{best / first:.2f}"
            root = f"{replicas**0.5:.2f}"
            if found:
                lines.append((str(replicas), method.name, _words(found, best), ratio, root))
    if lines:
        yield Table(
            name="rates_optima",
            title="The best learning rate",
            text="At the bottom of a parabola in the rate's logarithm, through the best of the "
            "rates that were tried and its two neighbours. Where the best one is the smallest or "
            "largest of all there is no optimum, only a bound. The ratio is to AllReduce's with as "
            "many replicas.",
            head=("replicas", "method", "best rate", "ratio to AllReduce's", "√G"),
            rows=lines,
        )


def _words(found: Mapping[float, float], best: float | None) -> str:
    if best is not None:
        return f"{best:.2g}"
    lowest = min(found, key=found.__getitem__)
    return f"{lowest:g}, at the border"


def draw(ours: Rows, stem: Path) -> Iterator[Path]:
    """Draw the loss over the learning rate, a panel for each number of replicas."""
    for replicas in REPLICAS:
        found = {
            method: {rate: [loss] for rate, loss in sorted(losses(ours, method, replicas).items())}
            for method in METHODS
        }
        if not any(found.values()):
            continue
        path = figures.beside(stem, name(replicas))
        with figures.panel(path, f"GPT-2, {name(replicas)}") as axis:
            figures.lines(axis, found)
            axis.set_xscale("log", base=2)
            axis.set_xticks([float(rate) for rate in RATES], [f"{float(r):g}" for r in RATES])
            axis.set_xlabel("learning rate")
            axis.set_ylabel("validation loss")
        yield path


RECIPE = Recipe(
    name="rates",
    title="Learning rates and replicas",
    text=f"GPT-2, {STEPS} steps of {SAMPLES} samples of all replicas together, τ = 12, validation "
    "loss on the data for tuning; one seed. With one replica local SGD is AllReduce, and CO2 is "
    "not: its means are as late as with more. Kept progress sends the model whole, without "
    "momentum.",
    rows=tuple(trial for method in METHODS for trial in at_rates(method, RATES)),
    columns=tuple(map(column, REPLICAS)),
    seeds=(TUNING_SEED,),
    scales=("smoke",),
    draw=draw,
    beside=optima,
)
