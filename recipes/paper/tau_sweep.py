"""CO2 and local SGD as τ changes: quality, overlap and throughput.

    make tau_sweep                                         its trials, then what won in them
    python -m recipes run tau_sweep --scale paper --launcher slurm

Cost: smoke, 40 trials and 75 runs of a minute and a half on 2 cores, three hours.
Found (results/tables/tau_sweep.md): CO2's loss is not shown to grow up to τ = 12; it grows from
there, faster than local SGD's, because its means are a round late. Trainings at the largest τ have
few rounds and say little of long ones.

The learning rate is tuned at three τ, with as many trials for every method; any other τ has the
rate of the nearest of these. At scale=paper nothing is tuned. Weights are evaluated as training
left them.
"""

import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from recipes.recipe import Column, Row, Rows
from recipes.tables import figures
from recipes.tables.entries import by_seed
from recipes.tables.methods import METHODS as METHOD_ROWS
from recipes.tables.methods import PAPERS_GAP, STEADY_GAP
from recipes.tuning.tuning import TunedRecipe, at_rates, trial_column

TAUS = (1, 3, 6, 12, 24, 48, 96, 192)
TUNED_TAUS = (3, 24, 96)
RATES = ("2e-3", "4e-3", "8e-3", "1.6e-2")
ALLREDUCE, LOCAL_SGD = METHOD_ROWS[:2]
DRAWN = (STEADY_GAP, PAPERS_GAP, LOCAL_SGD)
METHODS = {row.name: row.overrides for row in DRAWN}
GPT2 = ("task=gpt2",)
STEPS = 3600
"""conf's at scale=smoke."""

COLUMNS = (
    Column("validation loss", GPT2, "final.loss", lower=True, digits=4),
    Column("overlap, %", GPT2, "overlap", factor=100, curve=False),
)
TRIAL = trial_column("validation loss", GPT2)


def name(method: str, tau: int) -> str:
    """The name of the row of this method and τ."""
    return f"{method}, τ = {tau}"


def row(method: str, tau: int) -> Row:
    """A method, by its name in the table, with this τ. Its training ends with a round."""
    own = METHODS[method]
    key = own[0].removeprefix("method=")
    whole = () if STEPS % tau == 0 else (f"train.steps={math.ceil(STEPS / tau) * tau}",)
    return Row(name(method, tau), (*own, f"{key}.tau={tau}"), smoke=whole)


def nearest(tau: int) -> int:
    """The τ that was tuned and lies nearest, in factors; the smaller one of two."""
    return min(TUNED_TAUS, key=lambda tuned: abs(math.log(tau / tuned)))


def draw(ours: Rows, stem: Path) -> Iterator[Path]:
    """Draw every column over τ, a line for each method, with AllReduce as a dashed line."""
    values = by_seed(ours)
    for column in COLUMNS:
        found = {
            method: {
                tau: list(values[name(method.name, tau), column.name].values())
                for tau in TAUS
                if (name(method.name, tau), column.name) in values
            }
            for method in DRAWN
        }
        without = values.get((ALLREDUCE.name, column.name), {})
        if not without and not any(found.values()):
            continue
        path = figures.beside(stem, column.name)
        with figures.panel(path, f"GPT-2: {column.name}") as axis:
            figures.lines(axis, found)
            if without:
                figures.reference(axis, ALLREDUCE, statistics.fmean(without.values()))
            axis.set_xscale("log", base=2)
            axis.set_xticks(TAUS, [str(tau) for tau in TAUS], minor=False)
            axis.set_xlabel("τ, steps of a round")
            axis.set_ylabel(column.name)
        yield path


def tuned_at(method: str, tau: int) -> tuple[Row, ...]:
    """The trials of the nearest τ that was tuned."""
    return at_rates(row(method, nearest(tau)), RATES)


RECIPE = TunedRecipe(
    name="tau_sweep",
    title="CO2 and local SGD against τ",
    text="GPT-2 on the local network of one machine, each method at the best of four learning "
    "rates for the nearest of τ = 3, 24 and 96 (tau_sweep_trials). With τ = 96 and 192 trainings "
    "take 3,648 steps, not 3,600, so that they end with a round.",
    rows=(ALLREDUCE, *(row(method, tau) for method in METHODS for tau in TAUS)),
    columns=COLUMNS,
    draw=draw,
    grids={
        ALLREDUCE.name: at_rates(ALLREDUCE, RATES),
        **{name(method, tau): tuned_at(method, tau) for method in METHODS for tau in TAUS},
    },
    tuned_in={column.name: TRIAL for column in COLUMNS},
)
