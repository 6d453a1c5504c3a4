"""A hundred faults: does an elastic run end by itself, and what does it lose?

    sudo python -m recipes run faults                      all that is missing

Cost: 120 runs of half a minute on 2 cores, an hour. Disks and links want root.
Found: all 112 disturbed runs end by themselves. No step is missing or repeated, and no sample is
trained on twice. Training goes on .6 seconds after a loss is noticed, 1.7 at most. What is left out
is one or two rounds of a lost replica, and what then fills no batch. The loss is within the spread
between seeds.

Every cell is a run of train.py on the toy with four workers, to which one thing happens at a step,
and to a worker, drawn from its seed. Where links are cut each worker is a machine of its own, and
where the disk is full the run's folder lies on a small one. A run that had to end is started again
by the same command.
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
from functools import partial
from pathlib import Path
from typing import Any

from co2.errors import PREEMPTED
from co2.lab.slow_network import SlowNetwork
from co2.record.files import whole_lines
from co2.record.table import NOTHING, Table
from recipes.entries import by_seed, percent_above
from recipes.functions import FunctionCell, FunctionColumn, Trainer
from recipes.ledger import doubled_and_left_out
from recipes.recipe import Recipe, Row, Rows

STEPS, TAU, WORKERS = 240, 6, 4
METHODS = ("local_sgd", "diloco", "co2", "co2_keep")
SETTINGS = {"diloco": ("diloco.outer_lr=1", "diloco.outer_momentum=0.2")}
SAMPLES = 768
"""Of the training set: global batches of one, two, three and four workers divide it."""
SILENT_S = 5.0
RESTARTS = 4
PORT = 29400
"""Of the store, where workers are on machines of their own."""
LIMIT_S = 180.0
"""A run that has not ended by then never will."""
UNDISTURBED = "nothing"
SEEDS = (0, 1)


class Trouble:
    """One run, and what is done to it."""

    steps, tau, delay_s, saved_every, limit_s = STEPS, TAU, 0.05, 30, LIMIT_S
    launch: tuple[str, ...] = (
        *(f"launch.workers={WORKERS}", "launch.elastic=true", f"launch.silent_s={SILENT_S}"),
        f"launch.restarts={RESTARTS}",
    )
    started_by = b"multiprocessing.forkserver"
    """Stands in the command of every worker's process."""
    forked = True
    """Whether a child of the run's first process starts the workers, as what it is itself."""

    def __init__(self, cell: FunctionCell) -> None:
        method, seed = str(cell.settings["method"]), cell.seed
        self.random = random.Random(f"{method} {cell.settings['fault']} {seed}")
        self.place, self.ledger = cell.folder / "run", cell.folder / "ledger"
        shutil.rmtree(cell.folder, ignore_errors=True)
        self.starts = 0
        self.words = (
            *("task=toy", f"toy.samples={SAMPLES}", f"method={method}"),
            *SETTINGS.get(method, ()),
            *([] if method == "allreduce" else [f"{method}.tau={self.tau}"]),
            *(f"train.steps={self.steps}", f"train.seed={seed}", "train.eval_every=1000"),
            *(f"checkpoint.every={self.saved_every}", f"toy.delay_s={self.delay_s}"),
            *("log.every=1", "log.wandb=disabled", "tag=run", f"toy.ledger={self.ledger / 'now'}"),
            *(*self.launch, f"runs={self.place}"),
        )
        self.folder = self.place / "toy" / method / "run" / f"seed{seed}"

    def command(self) -> list[str]:
        """What starts the run."""
        return [sys.executable, "train.py", *self.words]

    def start(self) -> None:
        """Start the run, or start it again."""
        self.place.mkdir(parents=True, exist_ok=True)
        self.starts += 1
        if self.starts > 1:
            (self.ledger / "now").rename(self.ledger / str(self.starts - 1))
        with self.log().open("a") as log:
            self.process: subprocess.Popen[Any] = subprocess.Popen(
                self.command(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition. Raises `TimeoutError` where the run ends before, or hangs."""
        deadline = time.monotonic() + self.limit_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError("the run has ended, or hangs")
            time.sleep(0.02)

    def until_some_step(self) -> None:
        """Wait for a step drawn from the middle of the training."""
        step = self.random.randrange(40, STEPS // 2)
        self.until(lambda: self.step() >= step)

    def step(self) -> int:
        """How far the training is."""
        return max((line["step"] for line in self.lines("train")), default=0)

    def lines(self, *kinds: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl. Any: JSON."""
        found = whole_lines(self.folder / "metrics.jsonl")
        return [line for line in found if not kinds or line["kind"] in kinds]

    def workers(self) -> list[int]:
        """The workers' processes, oldest first."""
        parents: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                own = self.started_by in path.with_name("cmdline").read_bytes()
                if own and fields[0] != "Z":
                    parents[int(path.parent.name)] = int(fields[1])
        if self.forked:
            parents = {pid: parents.get(parent, 0) for pid, parent in parents.items()}
        return sorted(pid for pid, parent in parents.items() if parent == self.process.pid)

    def log(self) -> Path:
        """Where the run's output goes."""
        return self.place / "log"

    def hit(self, number: int, count: int = 1) -> list[int]:
        """Send a signal to workers drawn at random."""
        chosen = self.random.sample(self.workers(), count)
        for one in chosen:
            os.kill(one, number)
        return chosen

    def kill_all(self) -> None:
        """As when the machine goes down."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def checkpoints(self) -> list[Path]:
        """Newest first."""
        found = (self.folder / "checkpoints").glob("step_*")
        return sorted(found, key=lambda path: -int(path.name[5:]))


class SmallDisk(Trouble):
    """One run whose folder lies on a disk of its own."""

    def start(self) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", self.place], check=True)
        super().start()

    def log(self) -> Path:
        return self.place.with_name("log")

    def fill(self) -> Path:
        """A file that takes all the room there is."""
        filler = self.place / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        return filler

    def kill_all(self) -> None:
        super().kill_all()
        subprocess.run(["umount", "--lazy", self.place], check=True)


class Machines(Trouble):
    """One run on as many machines as workers, each a network namespace, and a store on one more."""

    def start(self) -> None:
        self.network = SlowNetwork([None] * (WORKERS + 1))
        self.network.__enter__()
        words = ("-m", "co2.train.store", f"--nodes={WORKERS}", f"--port={PORT}")
        self.process = self.network.start(WORKERS, [sys.executable, *words], os.environ)
        self.machines = [self.begin(machine) for machine in range(WORKERS)]

    def begin(self, machine: int) -> "subprocess.Popen[str]":
        """Start a machine's part of the run."""
        store = f"launch.store={self.network.address(WORKERS)}:{PORT}"
        words = [*self.command(), "launch.workers=1", store]
        return self.network.start(machine, words, os.environ)

    def cut_off(self, count: int) -> None:
        """Part some machines from the others until these have given them up; then mend the links,
        and start them again."""
        chosen = self.random.sample(range(WORKERS), count)
        self.network.part(chosen)
        self.until(lambda: sum(len(line["lost"]) for line in self.lines("members")) >= count)
        self.network.join(chosen)
        for machine in chosen:
            self.machines[machine].kill()
            self.machines[machine].wait()
            self.machines[machine] = self.begin(machine)

    def kill_all(self) -> None:
        self.network.__exit__(None, None, None)


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
    status = run.process.wait(LIMIT_S)
    assert status == PREEMPTED, status
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


def disk_full(run: SmallDisk) -> None:
    """The disk is full until a save has failed."""
    filler = run.fill()
    run.until(lambda: "could not be saved" in run.log().read_text())
    filler.unlink()


def cut_briefly(run: Machines) -> None:
    """The link of a machine is cut for a third of the time after which it counts as lost."""
    chosen = [run.random.randrange(WORKERS)]
    run.network.part(chosen)
    time.sleep(SILENT_S / 3)
    run.network.join(chosen)


def cut_off(run: Machines) -> None:
    """The link of a machine is cut until the others have given it up."""
    run.cut_off(1)


def parted(run: Machines) -> None:
    """Two machines are cut off together: the network falls in two."""
    run.cut_off(2)


Fault = tuple[type[Trouble], Callable[[Any], None]]
"""A kind of run, and what happens to it. Any: such a run."""
FAULTS: dict[str, Fault] = {
    UNDISTURBED: (Trouble, nothing),
    "a worker killed": (Trouble, killed),
    "the writer killed": (Trouble, writer_killed),
    "two killed at once": (Trouble, two_killed),
    "another killed amid recovery": (Trouble, killed_amid_recovery),
    "another killed amid joining": (Trouble, killed_amid_joining),
    "a worker stopped": (Trouble, stopped),
    "a worker paused": (Trouble, paused),
    "told to stop, started again": (Trouble, told_to_stop),
    "the starter killed, started again": (Trouble, starter_killed),
    "checkpoint torn, started again": (Trouble, torn_checkpoint),
    "disk full during a save": (SmallDisk, disk_full),
    "a link cut for a moment": (Machines, cut_briefly),
    "a link cut, mended": (Machines, cut_off),
    "the network in two, mended": (Machines, parted),
}
TOKENS = {name: function.__name__ for name, (_, function) in FAULTS.items()}


def trouble(cell: FunctionCell) -> tuple[Trouble, Callable[[], None]]:
    """The run of a cell, and what is done to it."""
    (name,) = (name for name, token in TOKENS.items() if token == cell.settings["fault"])
    kind, fault = FAULTS[name]
    run = kind(cell)
    return run, partial(fault, run)


def train(cells: Sequence[FunctionCell]) -> None:
    """Make these runs, one after the other."""
    for number, cell in enumerate(cells, start=1):
        run, fault = trouble(cell)
        run.start()
        try:
            run.until_some_step()
            fault()
            found = figures(run, run.process.wait(LIMIT_S))
        except (TimeoutError, subprocess.TimeoutExpired):
            found = {"ended": 0.0}
        finally:
            run.kill_all()
        cell.finish(found, WORKERS, STEPS)
        print(f"{number} of {len(cells)}: {' '.join(cell.overrides)}, seed {cell.seed}: {found}")


def figures(run: Trouble, status: int) -> dict[str, float]:
    """What became of a run that has ended."""
    told = [line["step"] for line in run.lines("train")]
    changes = run.lines("members")
    summary = run.folder / "summary.json"
    final = json.loads(summary.read_text())["final"]["loss"] if summary.exists() else None
    earlier = (run.ledger / str(start) for start in range(1, run.starts))
    doubled, left_out = doubled_and_left_out([*earlier, run.ledger / "now"], SAMPLES)
    found = {
        "ended": float(status == 0 and final is not None),
        "wrong_steps": float(len(told) != STEPS or told != sorted(set(told))),
        "lost": float(sum(len(line["lost"]) for line in changes)),
        "doubled": float(doubled),
        "left_out": float(left_out),
        "loss": math.inf if final is None else float(final),
    }
    seconds = [float(line["seconds"]) for line in changes]
    return found | ({"seconds": max(seconds)} if seconds else {})


def row(name: str, method: str) -> Row:
    """A method with a fault."""
    return Row(f"{name}: {method}", (f"method={method}", f"fault={TOKENS[name]}"))


def column(name: str, metric: str, digits: int, train: Trainer = train) -> FunctionColumn:
    """One of the figures of a run."""
    return FunctionColumn(
        name,
        (),
        f"final.{metric}",
        lower=metric not in ("ended", "goodput"),
        digits=digits,
        curve=False,
        train=train,
    )


ENDED, WRONG = column("ended by itself", "ended", 2), column("steps wrong", "wrong_steps", 2)
DOUBLED = column("samples doubled", "doubled", 0)
LEFT_OUT = column("samples left out", "left_out", 0)
LOST, SECONDS = column("replicas lost", "lost", 1), column("seconds to go on", "seconds", 2)
LOSS = column("loss", "loss", 4)


def tables(ours: Rows, _: Rows) -> Iterator[Table]:
    """One line for each kind of fault, over all methods and seeds."""
    values = by_seed(ours)
    usual = {method: values.get((f"{UNDISTURBED}: {method}", LOSS.name), {}) for method in METHODS}
    lines = []
    for name in TOKENS:

        def of(where: FunctionColumn, fault: str = name) -> list[float]:
            found = (values.get((f"{fault}: {method}", where.name), {}) for method in METHODS)
            return [value for one in found for value in one.values()]

        ended, seconds = of(ENDED), of(SECONDS)
        if not ended:
            continue
        above: list[float] = []
        for method in METHODS:
            losses = values.get((f"{name}: {method}", LOSS.name), {})
            finite = {seed: loss for seed, loss in losses.items() if math.isfinite(loss)}
            like = usual[method]
            if name == UNDISTURBED:
                like = dict.fromkeys(finite, statistics.fmean(finite.values()))
            above += percent_above(finite, like).values()
        share = f"{statistics.fmean(above):+.1f}" if above else NOTHING
        if len(above) > 1:
            share += f" ± {statistics.stdev(above):.1f}"
        lines.append(
            (
                name,
                f"{ended.count(1.0)} of {len(ended)}",
                str(int(sum(of(WRONG)))),
                f"{sum(of(LOST)) / len(ended):.1f}",
                str(int(sum(of(DOUBLED)))),
                f"{statistics.fmean(of(LEFT_OUT)):.0f}" if of(LEFT_OUT) else NOTHING,
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
            "twice. Samples: trained on twice within an epoch, in all runs; and left out of whole "
            f"epochs, of {SAMPLES} each, on average. Seconds: from noticing a loss until training "
            "goes on, without the time until it is noticed. Loss: percent above that of the "
            "undisturbed run of the same method and seed, ± standard deviation; the first line is "
            "the spread of those between seeds.",
            head=(
                *("fault", "ended", "steps wrong", "lost", "doubled", "left out"),
                *("seconds", "longest", "loss, %"),
            ),
            rows=lines,
        )


RECIPE = Recipe(
    name="faults",
    title="A hundred faults",
    text=f"Toy, {WORKERS} workers on 2 cores, {STEPS} steps, τ = {TAU}, launch.elastic=true with "
    f"four restarts and launch.silent_s={SILENT_S:g}. What happens, and at which step and to whom, "
    "is drawn from the seed. Seconds that are not run: nothing had to be done to go on.",
    rows=tuple(row(name, method) for name in TOKENS for method in METHODS),
    columns=(ENDED, WRONG, LOST, DOUBLED, LEFT_OUT, SECONDS, LOSS),
    seeds=SEEDS,
    scales=("smoke",),
    beside=tables,
    compared=False,
)
