"""A run of train.py to which something happens, and what can happen to it.

A run that had to end is started again by the same command.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from co2.errors import PREEMPTED
from co2.record.files import whole_lines
from co2_measure.lab.slow_network import SlowNetwork
from recipes.runs.functions import FunctionCell
from recipes.runs.processes import is_running, running
from recipes.tables.methods import KEPT_WHOLE

STEPS, TAU, WORKERS = 240, 6, 4
SETTINGS = {
    "diloco": ("diloco.outer_lr=1", "diloco.outer_momentum=0.2"),
    "co2_keep": KEPT_WHOLE,
}
SAMPLES = 768
"""Of the training set: global batches of one, two, three and four workers divide it."""
SILENT_S = 5.0
RESTARTS = 4
PORT = 29400
"""Of the store, where workers are on machines of their own."""
LIMIT_S = 180.0
"""A run that has not ended by then never will."""


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
        parents = {one.pid: one.parent for one in running() if self.started_by in one.command()}
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
        words = ("-m", "co2.elastic.store", f"--nodes={WORKERS}", f"--port={PORT}")
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
        self.network.partition(chosen)
        self.until(lambda: sum(len(line["lost"]) for line in self.lines("members")) >= count)
        self.network.heal(chosen)
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
    while any(map(is_running, pids)):
        if time.monotonic() > deadline:
            raise TimeoutError("a worker outlives what started it")
        time.sleep(0.05)
    run.start()


def torn_checkpoint(run: Trouble) -> None:
    """The machine goes down, and the newest checkpoint is torn; then start again."""
    run.until(lambda: len(run.checkpoints()) > 1)
    run.kill_all()
    path = run.checkpoints()[0] / "replica_0" / "worker_0.safetensors"
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
    run.network.partition(chosen)
    time.sleep(SILENT_S / 3)
    run.network.heal(chosen)


def cut_off(run: Machines) -> None:
    """The link of a machine is cut until the others have given it up."""
    run.cut_off(1)


def parted(run: Machines) -> None:
    """Two machines are cut off together: the network falls in two."""
    run.cut_off(2)
