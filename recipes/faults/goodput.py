"""What is left of a training of which a worker is killed once in 50 rounds.

    python -m recipes run goodput                          it wants the extra `peers`

Cost: 12 runs of three minutes on 2 cores: 40 minutes.
Found (results/tables/goodput.md): an elastic run keeps most, torchft a little less, and torchrun
least, because it starts all workers again.

Four workers sleep for a quarter of a second in every step, so that rounds last three seconds, as on
GPUs. Which of the rounds, and which worker, is drawn from the seed. What comes out is held against
the simulator's closed forms (co2_measure/simulate/failures.py).
"""

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from co2.record.files import whole_lines
from co2.record.table import Table
from co2_measure.simulate.failures import DISCARD, ELASTIC, RESTART, Faults, Round, goodput
from recipes.faults.columns import column
from recipes.faults.elsewhere import Torchft, Torchrun
from recipes.faults.trouble import WORKERS, Trouble, killed
from recipes.recipe import Recipe, Row, Rows
from recipes.runs.functions import FunctionCell
from recipes.tables.entries import by_seed

TAU, WARM_UP, ROUNDS = 12, 2, 50
DELAY_S = 0.25
FIRST, LAST = 10, 40
"""The rounds after the warm-up between which the worker is killed."""
SAVED_EVERY = 24
"""Steps between checkpoints, from which torchrun goes on: about Daly's optimum for a failure in 150
seconds and checkpoints of a tenth of a second."""
GOAL = 97


class Long(Trouble):
    """A run of three minutes: 50 rounds after a warm-up."""

    steps, tau, delay_s = TAU * (WARM_UP + ROUNDS), TAU, DELAY_S
    saved_every, limit_s = SAVED_EVERY, 400.0

    def is_back(self, before: set[int]) -> bool:
        """Whether the killed worker has been replaced; `before`: the workers before that."""
        raise NotImplementedError

    def missing(self) -> float:
        """Replica-steps that were not made, or were thrown away."""
        raise NotImplementedError


class Elastic(Long):
    """With launch.elastic."""

    def is_back(self, before: set[int]) -> bool:
        return any(line["joined"] for line in self.lines("members"))

    def missing(self) -> float:
        summary = json.loads((self.folder / "summary.json").read_text())
        batch = yaml.safe_load((self.folder / "config.yaml").read_text())["train"]["batch_size"]
        made = summary["throughput"] * summary["train_s"] / batch
        lost = sum(len(line["lost"]) for line in self.lines("members"))
        return WORKERS * (self.steps - 1) - made + lost * self.tau  # the first step is not timed


class Restarting(Torchrun, Long):
    """All workers are started again, and make the steps again that were not saved."""

    def is_back(self, before: set[int]) -> bool:
        now = self.workers()
        if before & set(now) or len(now) < WORKERS:
            return False
        started = max(Path(f"/proc/{worker}").stat().st_mtime for worker in now)
        return (self.folder / "metrics.jsonl").stat().st_mtime > started

    def missing(self) -> float:
        return 0.0


class Discarding(Torchft, Long):
    """With torchft."""

    def is_back(self, before: set[int]) -> bool:
        files = list(self.place.glob("*.jsonl"))
        return len(files) > WORKERS and all(path.stat().st_size for path in files)

    def missing(self) -> float:
        made = 0
        for path in self.place.glob("*.jsonl"):
            made += in_whole_rounds({line["step"] for line in whole_lines(path)})
        return float(WORKERS * self.steps - made)


def in_whole_rounds(steps: set[int]) -> int:
    """How many of the steps that a replica has made belong to rounds that it made as a whole. One
    that has just come makes some of the first round until it learns how far the others are."""
    rounds = range(max(steps, default=0) // TAU)
    return TAU * sum(steps.issuperset(range(n * TAU + 1, n * TAU + TAU + 1)) for n in rounds)


SYSTEMS: dict[str, tuple[type[Long], str, str]] = {
    "CO2, launch.elastic": (Elastic, "co2", ELASTIC),
    "DiLoCo, torchft": (Discarding, "diloco", DISCARD),
    "CO2, torchrun": (Restarting, "co2", RESTART),
    "DDP, torchrun": (Restarting, "allreduce", RESTART),
}
"""The kind of run, the method, and the simulator's name for what is done about a loss."""
KINDS = {kind.__name__: kind for kind, _, _ in SYSTEMS.values()}


def train(cells: Sequence[FunctionCell]) -> None:
    """Make these runs, one after the other."""
    for number, cell in enumerate(cells, start=1):
        run = KINDS[str(cell.settings["system"])](cell)
        run.start()
        try:
            found = watched(run)
        except TimeoutError:
            found = {"ended": 0.0}
        finally:
            run.kill_all()
        cell.finish(found, WORKERS, run.steps)
        print(f"{number} of {len(cells)}: {' '.join(cell.overrides)}, seed {cell.seed}: {found}")


def watched(run: Long) -> dict[str, float]:
    """Kill a worker of a run, and see what it costs. Raises `TimeoutError` if the run hangs, or
    ends before."""
    first = WARM_UP * run.tau
    run.until(lambda: run.step() >= first)
    began, first = time.monotonic(), run.step()
    struck = run.random.randrange(FIRST * run.tau, LAST * run.tau)
    run.until(lambda: run.step() >= struck)
    killed_at, struck, workers = time.monotonic(), run.step(), set(run.workers())
    killed(run)
    run.until(lambda: run.is_back(workers))
    back_s = time.monotonic() - killed_at
    run.until(lambda: run.step() >= run.steps)
    seconds = time.monotonic() - began
    status = run.process.wait(run.limit_s)
    step_s = (killed_at - began) / (struck - first)
    steps = run.steps - first
    useful = 1 - run.missing() / (WORKERS * steps)
    return {
        "ended": float(status == 0),
        "goodput": 100 * useful * steps * step_s / seconds,
        "missing": run.missing(),
        "back_s": back_s,
        "step_s": step_s,
    }


def row(system: str) -> Row:
    """A system, by its name in the table."""
    kind, method, _ = SYSTEMS[system]
    return Row(system, (f"method={method}", f"system={kind.__name__}", "fault=killed"))


ENDED, GOODPUT = column("ended by itself", "ended", 2, train), "goodput, %"
MISSING, BACK = "replica-steps missing", "seconds until replaced"


def tables(ours: Rows, _: Rows) -> Iterator[Table]:
    """What the simulator's closed forms expect of a loss in 50 rounds."""
    values = by_seed(ours)
    lines = []
    for system, (_kind, _method, way) in SYSTEMS.items():
        measured, back = (values.get((system, name), {}).values() for name in (GOODPUT, BACK))
        if measured and back:
            round_s = TAU * DELAY_S
            faults = Faults(
                mtbf_s=WORKERS * ROUNDS * round_s,
                restart_s=statistics.median(back),
                checkpoint_s=1e-9,  # what saving costs is a part of the undisturbed steps
                checkpoint_every_s=SAVED_EVERY * DELAY_S,
            )
            expected = 100 * goodput(way, faults, WORKERS, Round(round_s))
            lines.append((system, f"{statistics.median(measured):.1f}", f"{expected:.1f}"))
    if lines:
        yield Table(
            name="goodput_simulated",
            title="Goodput, measured and simulated",
            text="Percent; the median of the measured ones, and the simulator's closed form with "
            "the median of the seconds until a worker is replaced. It draws losses at random, on "
            "average one in 50 rounds, where there was exactly one.",
            head=("system", "measured", "simulated"),
            rows=lines,
        )


RECIPE = Recipe(
    name="goodput",
    title="Goodput",
    text=f"Toy, {WORKERS} workers on 2 cores, steps of {DELAY_S} s, τ = {TAU}; after {WARM_UP} "
    f"rounds there are {ROUNDS}, in one of which a worker is killed. Goodput: useful replica-steps "
    "per second, as a share of those before the loss. Missing replica-steps were not made, or were "
    f"thrown away. The goal for launch.elastic is {GOAL} %.",
    rows=tuple(map(row, SYSTEMS)),
    columns=(
        ENDED,
        column(GOODPUT, "goodput", 1, train),
        column(MISSING, "missing", 0, train),
        column(BACK, "back_s", 1, train),
    ),
    scales=("smoke",),
    beside=tables,
    undisturbed=True,
)
