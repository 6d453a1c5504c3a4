"""What a person reads: progress while a run trains, a table at its end, a table of a sweep."""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from co2.errors import DIVERGED, PREEMPTED, REFUSED
from co2.record.metrics import Metrics, Summary

NOTHING = "—"
_FIRST_STEPS, _FEWEST_STEPS, _RECENT_STEPS = 2, 3, 100
"""Of a process: steps that say nothing of the pace; the fewest, and the most, that it is read
from."""


class Console:
    """What the person at the terminal reads while a run trains. This one is silent: it is that of
    every worker but the first."""

    def print_line(self, line: str) -> None:
        """Print one line."""

    def progress(self, step: int, metrics: Metrics | None = None) -> None:
        """A step has ended; `metrics` where there are new ones."""

    def close(self) -> None:
        """Nothing is printed after it."""


class ProgressConsole(Console):
    """Worker 0's: a progress bar on a terminal, elsewhere a line every few seconds.

    Args:
        title: of the run.
        steps: of the whole run.
        unit: what throughput counts, "tokens" or "samples".
        every_s: seconds between two lines where there is no terminal.
    """

    def __init__(self, title: str, steps: int, unit: str, every_s: float = 5.0) -> None:
        self.console = rich.console.Console()
        self.steps, self.unit, self.title, self.every_s = steps, unit, title, every_s
        self._last_line = time.perf_counter()
        self._pace = Pace(steps)
        self._bar: Progress | None = None
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self.console)
            self._task = self._bar.add_task(title, total=steps, figures="")
            self._bar.start()

    def print_line(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def progress(self, step: int, metrics: Metrics | None = None) -> None:
        text = ""
        if metrics is not None:
            text = f"loss {metrics.loss:.3f}"
            if metrics.throughput > 0:  # else no step was timed yet
                text += f"  {metrics.throughput:,.0f} {self.unit}/s"
                if metrics.mfu is not None:
                    text += f"  {metrics.per_gpu:,.0f} per GPU  MFU {metrics.mfu:.1%}"
                text += f"  exposed {_share(metrics.exposed_share)}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
            if text:
                self._bar.update(self._task, figures=text)
            return
        now = time.perf_counter()
        left = self._pace.left(step, now)
        if text and (now - self._last_line >= self.every_s or step == self.steps):
            told = "" if left is None else f"  {left:.0f} s left"
            self.print_line(f"step {step}/{self.steps}  {text}{told}")
            self._last_line = now

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Pace:
    """How long the rest of a run takes, if its steps go on as the last hundred did.

    The first steps of a process compile and allocate, so they do not count.

    Args:
        steps: of the whole run.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._seen = steps, 0
        self._ends: deque[float] = deque(maxlen=_RECENT_STEPS + 1)
        """When the last steps ended."""

    def left(self, step: int, now: float) -> float | None:
        """Seconds left after this step, which has ended now; None while too few have been seen. To
        be called after every step."""
        self._seen += 1
        if self._seen >= _FIRST_STEPS:
            self._ends.append(now)
        timed = len(self._ends) - 1
        if timed < _FEWEST_STEPS:
            return None
        return (now - self._ends[0]) / timed * (self._steps - step)


def closing_table(summary: Summary) -> str:
    """The end of a run: what was learnt, what it cost, and where it lies."""
    table = Table(title=summary.title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary.final.items():
        table.add_row(f"validation {name}", _number(value))
    for name, value in summary.baselines.items():
        table.add_row(name.replace("_", " "), _number(value))
    rate = f"{summary.throughput:,.0f}"
    table.add_row(f"{summary.unit}/s, all {summary.workers} workers", rate)
    if summary.mfu is not None:
        table.add_row("model FLOP utilization", f"{summary.mfu:.1%}")
    exposed, hidden = "not measured: fully_shard keeps no clocks", "not measured"
    if summary.exposed_s is not None:
        exposed = f"{summary.exposed_s:.2f} s, {summary.exposed_share:.2%} of training time"
        hidden = "no communication" if summary.overlap is None else f"{summary.overlap:.4f}"
    table.add_row("exposed communication", exposed)
    table.add_row("waiting for data", f"{summary.data_share:.2%} of training time")
    if summary.saving_s is not None:
        table.add_row("stood still for checkpoints", f"{summary.saving_s:.2f} s")
    table.add_row("overlap", hidden)
    table.add_row("bytes sent per step and worker", f"{summary.bytes_per_step:,.0f}")
    if summary.exchange:
        told = ["bytes_per_step", "exposed_s", "overlap"]
        sent, waited, share = (summary.exchange[name] or 0.0 for name in told)
        text = f"{sent:,.0f} bytes a step, exposed {waited:.2f} s, overlap {share:.4f}"
        table.add_row("tokens sent to experts", text)
    if summary.reading:
        told = ["read_bytes", "amplification", "planning_s"]
        read, times, planned = (summary.reading[name] or 0.0 for name in told)
        text = f"{read / 2**20:,.0f} MiB, {times:.2f} × what was needed; planned {planned:.0f} s"
        table.add_row("read from disk by a worker", text)
    place = ", in the host's memory" if summary.memory.host_bytes else ""
    table.add_row("extra model copies", f"{summary.extra_model_copies:g}{place}")
    table.add_row("peak memory of a worker", f"{summary.peak_memory_bytes / 2**20:,.0f} MiB")
    table.add_row("wall time", f"{summary.wall_s:.0f} s")
    # Below the table, where a narrow terminal does not cut it: it is to be copied.
    return f"{_rendered(table)}folder: {summary.folder}\n"


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


def _share(value: float) -> str:
    return "not measured" if math.isnan(value) else f"{value:.1%}"


def _rendered(table: Table) -> str:
    console = rich.console.Console()
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@dataclass(frozen=True)
class Outcome:
    """How one job of a sweep ended."""

    overrides: Sequence[str]
    status: int
    """The exit status."""
    summary: Summary | None
    """None where the job failed."""


def sweep_table(outcomes: Sequence[Outcome]) -> str:
    """The end of a sweep: a line for each job, named by the overrides in which the jobs differ, and
    below the table where each lies, or how it has failed."""
    common = set.intersection(*(set(outcome.overrides) for outcome in outcomes))
    finals = [outcome.summary.final for outcome in outcomes if outcome.summary]
    names = list(dict.fromkeys(name for final in finals for name in final))
    table = Table(title=f"sweep: {' '.join(o for o in outcomes[0].overrides if o in common)}")
    for head in ("job", *names, "units/s", "overlap"):
        table.add_column(head, overflow="fold")
    places = []
    for outcome in outcomes:
        own = " ".join(o for o in outcome.overrides if o not in common) or "(the only one)"
        summary = outcome.summary
        if summary is None:
            table.add_row(own, *[NOTHING] * (len(names) + 2))
            places.append(f"{own}: {_failure(outcome.status)}\n")
            continue
        places.append(f"{own}: {summary.folder}\n")
        table.add_row(
            own,
            *(_number(summary.final.get(name)) for name in names),
            f"{summary.throughput:,.0f}",
            _number(summary.overlap),
        )
    return _rendered(table) + "".join(places) + _best(outcomes, common)


def _best(outcomes: Sequence[Outcome], common: set[str]) -> str:
    """The job with the lowest validation loss; empty where there is nothing to compare."""
    losses = {
        " ".join(o for o in outcome.overrides if o not in common): loss
        for outcome in outcomes
        if outcome.summary and (loss := outcome.summary.final.get("loss")) is not None
    }
    tasks = {outcome.summary.task for outcome in outcomes if outcome.summary}
    if len(losses) < 2 or len(tasks) > 1:
        return ""
    name = min(losses, key=losses.__getitem__)
    return f"lowest validation loss: {losses[name]:.4f} with {name}"


def _failure(status: int) -> str:
    reasons = {
        DIVERGED: "the loss is not finite",
        REFUSED: "refused",
        PREEMPTED: "stopped and saved; the same command goes on",
    }
    return f"{reasons.get(status, 'failed')} (exit status {status}); see above"
