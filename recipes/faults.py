"""A hundred faults: does an elastic run end by itself, and what does it lose?

    python -m recipes run faults                           all that is missing

Cost: 120 runs of 20 seconds on 2 cores, 40 minutes.
Not yet run as a whole. Expected: all runs end by themselves; no step is missing or repeated; the
loss is within the spread of undisturbed runs; training goes on within a second of noticing.

Every cell is a run of train.py on the toy with four workers, to which one thing happens at a step,
and to a worker, drawn from its seed. A run that had to end is started again by the same command.
"""

import contextlib
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from co2.errors import PREEMPTED
from co2.record.table import NOTHING, Table
from recipes.entries import by_seed
from recipes.functions import FunctionCell, FunctionColumn
from recipes.recipe import Recipe, Row, Rows

STEPS, TAU, WORKERS = 240, 6, 4
METHODS = ("local_sgd", "diloco", "co2", "co2_keep")
SETTINGS = {"diloco": ("diloco.outer_lr=1", "diloco.outer_momentum=0.2")}
SILENT_S = 5.0
LIMIT_S = 180.0
"""A run that has not ended by then never will."""
UNDISTURBED = "nothing"
SEEDS = (0, 1, 2)


class Trouble:
    """One run, and what is done to it."""

    def __init__(self, cell: FunctionCell) -> None:
        method, seed = str(cell.settings["method"]), cell.seed
        self.random = random.Random(f"{method} {cell.settings['fault']} {seed}")
        self.place = cell.folder / "run"
        shutil.rmtree(self.place, ignore_errors=True)
        self.words = (
            *("task=toy", f"method={method}", f"{method}.tau={TAU}", *SETTINGS.get(method, ())),
            *(f"train.steps={STEPS}", f"train.seed={seed}", "train.eval_every=1000", "log.every=1"),
            *("checkpoint.every=30", "log.wandb=disabled", "toy.delay_s=0.02", "tag=run"),
            *(f"launch.workers={WORKERS}", "launch.elastic=true", f"launch.silent_s={SILENT_S}"),
            *("launch.restarts=4", f"runs={self.place}"),
        )
        self.folder = self.place / "toy" / method / "run" / f"seed{seed}"
        self.starts = 0

    def start(self) -> None:
        """Start the run, or start it again."""
        self.starts += 1
        command = [sys.executable, "train.py", *self.words]
        self.place.mkdir(parents=True, exist_ok=True)
        with (self.place / "log").open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition. Raises `TimeoutError` where the run ends before, or hangs."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError("the run has ended, or hangs")
            time.sleep(0.02)

    def until_some_step(self) -> None:
        """Wait for a step drawn from the middle of the training."""
        step = self.random.randrange(40, STEPS // 2)
        self.until(lambda: max((line["step"] for line in self.lines()), default=0) >= step)

    def lines(self, *kinds: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl. Any: JSON."""
        path = self.folder / "metrics.jsonl"
        texts = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(text) for text in texts if text.endswith("\n")]
        return [line for line in found if not kinds or line["kind"] in kinds]

    def workers(self) -> list[int]:
        """The workers' processes, oldest first."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                own = b"spawn_main" in path.with_name("cmdline").read_bytes()
                if int(fields[1]) == self.process.pid and own and fields[0] != "Z":
                    found.append(int(path.parent.name))
        return sorted(found)

    def hit(self, number: int, count: int = 1) -> list[int]:
        """Send a signal to workers drawn at random."""
        chosen = self.random.sample(self.workers(), count)
        for one in chosen:
            os.kill(one, number)
        return chosen

    def kill_all(self) -> None:
        """As when the machine goes down."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def checkpoints(self) -> list[Path]:
        """Newest first."""
        found = (self.folder / "checkpoints").glob("step_*")
        return sorted(found, key=lambda path: -int(path.name[5:]))


def nothing(run: Trouble) -> None:
    """Undisturbed."""


def killed(run: Trouble) -> None:
    """SIGKILL to a worker."""
    run.hit(signal.SIGKILL)


def writer_killed(run: Trouble) -> None:
    """SIGKILL to the worker that writes."""
    os.kill(run.workers()[0], signal.SIGKILL)


def two_killed(run: Trouble) -> None:
    """SIGKILL to two workers at once."""
    run.hit(signal.SIGKILL, 2)


def killed_amid_recovery(run: Trouble) -> None:
    """SIGKILL to another worker as soon as the first loss is noticed."""
    run.hit(signal.SIGKILL)
    run.until(lambda: len(run.lines("members")) > 0)
    run.hit(signal.SIGKILL)


def killed_amid_joining(run: Trouble) -> None:
    """SIGKILL to another worker as soon as the one started in place of the first has joined."""
    run.hit(signal.SIGKILL)
    run.until(lambda: any(line["joined"] for line in run.lines("members")))
    run.hit(signal.SIGKILL)


def stopped(run: Trouble) -> None:
    """SIGSTOP to a worker, for good."""
    run.hit(signal.SIGSTOP)


def paused(run: Trouble) -> None:
    """SIGSTOP to a worker, for a third of the time after which it counts as lost."""
    (one,) = run.hit(signal.SIGSTOP)
    time.sleep(SILENT_S / 3)
    os.kill(one, signal.SIGCONT)


def told_to_stop(run: Trouble) -> None:
    """SIGTERM to what started the workers: save, end, and start again."""
    run.process.terminate()
    assert run.process.wait(LIMIT_S) == PREEMPTED
    run.start()


def starter_killed(run: Trouble) -> None:
    """SIGKILL to what started the workers, which holds the store; then start again."""
    pids = run.workers()
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + LIMIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            raise TimeoutError("a worker outlives what started it")
        time.sleep(0.05)
    run.start()


def torn_checkpoint(run: Trouble) -> None:
    """The machine goes down, and the newest checkpoint is torn; then start again."""
    run.until(lambda: len(run.checkpoints()) > 1)
    run.kill_all()
    path = run.checkpoints()[0] / "rank_0.pt"
    os.truncate(path, path.stat().st_size // 2)
    run.start()


FAULTS: dict[str, Callable[[Trouble], None]] = {
    UNDISTURBED: nothing,
    "a worker killed": killed,
    "the writer killed": writer_killed,
    "two killed at once": two_killed,
    "another killed amid recovery": killed_amid_recovery,
    "another killed amid joining": killed_amid_joining,
    "a worker stopped": stopped,
    "a worker paused": paused,
    "told to stop, started again": told_to_stop,
    "the starter killed, started again": starter_killed,
    "checkpoint torn, started again": torn_checkpoint,
}
TOKENS = {name: function.__name__ for name, function in FAULTS.items()}
BY_TOKEN = {function.__name__: function for function in FAULTS.values()}


def train(cells: Sequence[FunctionCell]) -> None:
    """Make these runs, one after the other."""
    for number, cell in enumerate(cells, start=1):
        fault = BY_TOKEN[str(cell.settings["fault"])]
        run = Trouble(cell)
        run.start()
        try:
            run.until_some_step()
            fault(run)
            status = run.process.wait(LIMIT_S)
        except (TimeoutError, subprocess.TimeoutExpired):
            status = 1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()
        cell.finish(figures(run, status), WORKERS, STEPS)
        print(f"{number} of {len(cells)}: {' '.join(cell.overrides)}, seed {cell.seed}: {status}")


def figures(run: Trouble, status: int) -> dict[str, float]:
    """What became of a run."""
    told = [line["step"] for line in run.lines("train")]
    changes = run.lines("members")
    summary = run.folder / "summary.json"
    final = json.loads(summary.read_text())["final"]["loss"] if summary.exists() else None
    found = {
        "ended": float(status == 0 and final is not None),
        "wrong_steps": float(len(told) != STEPS or told != sorted(set(told))),
        "lost": float(sum(len(line["lost"]) for line in changes)),
        "loss": math.inf if final is None else float(final),
    }
    seconds = [float(line["seconds"]) for line in changes]
    return found | ({"seconds": max(seconds)} if seconds else {})


def row(name: str, method: str) -> Row:
    """A method with a fault."""
    return Row(f"{name}: {method}", (f"method={method}", f"fault={TOKENS[name]}"))


def column(name: str, metric: str, digits: int) -> FunctionColumn:
    """One of the figures of a run."""
    return FunctionColumn(
        name,
        (),
        f"final.{metric}",
        lower=metric != "ended",
        digits=digits,
        curve=False,
        train=train,
    )


ENDED, WRONG = column("ended by itself", "ended", 2), column("steps wrong", "wrong_steps", 2)
LOST, SECONDS = column("replicas lost", "lost", 1), column("seconds to go on", "seconds", 2)
LOSS = column("loss", "loss", 4)


def tables(ours: Rows, _: Rows) -> Iterator[Table]:
    """One line for each kind of fault, over all methods and seeds."""
    values = by_seed(ours)
    usual = {
        method: list(values.get((f"{UNDISTURBED}: {method}", LOSS.name), {}).values())
        for method in METHODS
    }
    lines = []
    for name in FAULTS:

        def of(where: FunctionColumn, fault: str = name) -> list[float]:
            found = (values.get((f"{fault}: {method}", where.name), {}) for method in METHODS)
            return [value for one in found for value in one.values()]

        ended, seconds = of(ENDED), of(SECONDS)
        if not ended:
            continue
        above = [
            100 * (loss / statistics.fmean(usual[method]) - 1)
            for method in METHODS
            for loss in values.get((f"{name}: {method}", LOSS.name), {}).values()
            if usual[method] and math.isfinite(loss)
        ]
        share = f"{statistics.fmean(above):+.1f}" if above else NOTHING
        if len(above) > 1:
            share += f" ± {statistics.stdev(above):.1f}"
        lines.append(
            (
                name,
                f"{ended.count(1.0)} of {len(ended)}",
                str(int(sum(of(WRONG)))),
                f"{sum(of(LOST)) / len(ended):.1f}",
                f"{statistics.median(seconds):.2f}" if seconds else NOTHING,
                f"{max(seconds):.2f}" if seconds else NOTHING,
                share,
            )
        )
    if lines:
        yield Table(
            name="faults_kinds",
            title="Faults, by kind",
            text="Over all methods and seeds. Wrong steps: runs in which a step is missing or told "
            "twice. Seconds: from noticing a loss until training goes on, without the time until "
            "it is noticed. Loss: percent above the mean of the undisturbed runs of the method, ± "
            "standard deviation; the first line is the spread between seeds.",
            head=("fault", "ended", "steps wrong", "lost", "seconds", "longest", "loss, %"),
            rows=lines,
        )


RECIPE = Recipe(
    name="faults",
    title="A hundred faults",
    text=f"Toy, {WORKERS} workers on 2 cores, {STEPS} steps, τ = {TAU}, launch.elastic=true with "
    f"four restarts and launch.silent_s={SILENT_S:g}. What happens, and at which step and to whom, "
    "is drawn from the seed.",
    rows=tuple(row(name, method) for name in FAULTS for method in METHODS),
    columns=(ENDED, WRONG, LOST, SECONDS, LOSS),
    seeds=SEEDS,
    scales=("smoke",),
    beside=tables,
)
