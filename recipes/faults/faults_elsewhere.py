"""The same faults under other systems: what does a lost worker cost those that are left?

    python -m recipes run faults_elsewhere                 it wants the extra `peers`

Cost: 32 runs of half a minute on 2 cores, four of them of three minutes: half an hour.
Found (results/tables/faults_elsewhere.md): a killed worker costs an elastic run a fraction of a
second, torchft its heartbeat time-out, and torchrun a restart and repeated steps.

Every run is one of the recipe `faults`, to which one thing happens at a step, and to a worker,
drawn from its seed; in place of a lost worker another is started. torchrun ends and starts all
workers, which go on from the checkpoint of every 30 steps.
"""

import time
from collections.abc import Callable, Sequence

from recipes.faults.columns import SEEDS, column
from recipes.faults.elsewhere import Torchft, Torchrun
from recipes.faults.trouble import (
    LIMIT_S,
    STEPS,
    TAU,
    WORKERS,
    Trouble,
    killed,
    paused,
    stopped,
    two_killed,
)
from recipes.recipe import Recipe, Row
from recipes.runs.functions import FunctionCell

FURTHER = 4 * TAU
"""Steps over which it is seen how much time a fault costs."""


SYSTEMS: dict[str, tuple[type[Trouble], str]] = {
    "CO2, launch.elastic": (Trouble, "co2"),
    "DiLoCo, torchft": (Torchft, "diloco"),
    "CO2, torchrun": (Torchrun, "co2"),
    "DDP, torchrun": (Torchrun, "allreduce"),
}
FAULTS: dict[str, Callable[[Trouble], None]] = {
    "a worker killed": killed,
    "two killed at once": two_killed,
    "a worker stopped": stopped,
    "a worker paused": paused,
}
KINDS = {kind.__name__: kind for kind, _ in SYSTEMS.values()}
DONE = {fault.__name__: fault for fault in FAULTS.values()}


def train(cells: Sequence[FunctionCell]) -> None:
    """Make these runs, one after the other."""
    for number, cell in enumerate(cells, start=1):
        run = KINDS[str(cell.settings["system"])](cell)
        run.start()
        try:
            found = watched(run, DONE[str(cell.settings["fault"])])
        except TimeoutError:
            found = {"ended": 0.0}
        finally:
            run.kill_all()
        cell.finish(found, WORKERS, STEPS)
        print(f"{number} of {len(cells)}: {' '.join(cell.overrides)}, seed {cell.seed}: {found}")


def watched(run: Trouble, fault: Callable[[Trouble], None]) -> dict[str, float]:
    """Do it to a run, and see what it costs. Raises `TimeoutError` for a run that ends before."""
    run.until_some_step()
    began, first = time.monotonic(), run.step()
    run.until(lambda: run.step() >= first + FURTHER)
    usual, before = time.monotonic() - began, run.step()
    since, last, again = time.monotonic(), before, 0
    fault(run)  # which may take a while itself
    found: dict[str, float] = {}
    while run.process.poll() is None and time.monotonic() - since < LIMIT_S:
        step = run.step()
        again += max(0, last - step)
        if step >= before + FURTHER and "seconds" not in found:
            found["seconds"] = time.monotonic() - since - usual
        last = step
        time.sleep(0.01)
    return found | {"ended": float(run.process.poll() == 0), "again": float(again)}


def row(system: str, fault: str) -> Row:
    """A system with a fault."""
    kind, method = SYSTEMS[system]
    words = (f"method={method}", f"system={kind.__name__}", f"fault={FAULTS[fault].__name__}")
    return Row(f"{fault}: {system}", words)


RECIPE = Recipe(
    name="faults_elsewhere",
    title="Faults under other systems",
    text=f"Toy, {WORKERS} workers on 2 cores, {STEPS} steps, τ = {TAU}; what happens is drawn from "
    f"the seed. Seconds lost: from the fault until the training is {FURTHER} steps further, less "
    f"what {FURTHER} steps took before it; where they are not run it got no further. Steps again: "
    "by how many a training falls back. A run has ended by itself if it did within "
    f"{LIMIT_S:g} seconds.",
    rows=tuple(row(system, fault) for fault in FAULTS for system in SYSTEMS),
    columns=(
        column("ended by itself", "ended", 2, train),
        column("seconds lost", "seconds", 1, train),
        column("steps again", "again", 0, train),
    ),
    seeds=SEEDS,
    scales=("smoke",),
    compared=False,
)
