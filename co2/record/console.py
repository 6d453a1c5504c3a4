"""What a person reads: progress while a run trains, a table at its end, a table of a sweep."""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from co2.config import Validation
from co2.errors import DIVERGED, PREEMPTED, REFUSED
from co2.record.metrics import Metrics, Summary
from co2.record.table import NOTHING

_REASONS = {
    DIVERGED: "the loss is not finite",
    REFUSED: "refused",
    PREEMPTED: "stopped and saved; the same command goes on",
}
_FEWEST_STEPS, _RECENT_STEPS = 3, 100
"""From so many steps of this process the time left is estimated, at least and at most."""


class Console:
    """Prints for a person while a run trains. This class is silent: all workers but the first have
    it."""

    def print_line(self, line: str) -> None:
        """Print one line."""

    def progress(self, step: int, metrics: Metrics | None = None) -> None:
        """A step has ended; `metrics` where there are new ones."""

    def close(self) -> None:
        """Nothing is printed after it."""


class ProgressConsole(Console):
    """Worker 0's: a progress bar on a terminal, elsewhere a line every few seconds.

    Args:
        steps: of the whole run.
        unit: what throughput counts, "tokens" or "samples".
        every_s: seconds between two lines where there is no terminal.
    """

    def __init__(self, title: str, steps: int, unit: str, every_s: float = 5.0) -> None:
        self.console = rich.console.Console()
        self.steps, self.unit, self.every_s = steps, unit, every_s
        self._last_line = time.perf_counter()
        self._seen = 0
        self._ends: deque[float] = deque(maxlen=_RECENT_STEPS + 1)
        """When the last steps ended, from the second on: the first ones compile and allocate."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
        )
        terminal = self.console.is_terminal
        self._bar = Progress(*columns, console=self.console, disable=not terminal)
        self._task = self._bar.add_task(title, total=steps, figures="")
        self._bar.start()

    def print_line(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def progress(self, step: int, metrics: Metrics | None = None) -> None:
        text = "" if metrics is None else self._figures(metrics)
        now = time.perf_counter()
        self._seen += 1
        if self._seen > 1:
            self._ends.append(now)
        if not self._bar.disable:
            self._bar.update(self._task, completed=step)
            if text:
                self._bar.update(self._task, figures=text)
        elif text and (now - self._last_line >= self.every_s or step == self.steps):
            self.print_line(f"step {step}/{self.steps}  {text}{self._left(step)}")
            self._last_line = now

    def _figures(self, metrics: Metrics) -> str:
        text = f"loss {metrics.loss:.3f}"
        if metrics.throughput > 0:  # else no step was timed yet
            text += f"  {metrics.throughput:,.0f} {self.unit}/s"
            if metrics.mfu is not None:
                text += f"  {metrics.per_gpu:,.0f} per GPU  MFU {metrics.mfu:.1%}"
            lost = metrics.exposed_share
            text += f"  exposed {'not measured' if math.isnan(lost) else format(lost, '.1%')}"
        return text

    def _left(self, step: int) -> str:
        """The time left at the pace of the last hundred steps; empty while too few are made."""
        timed = len(self._ends) - 1
        if timed < _FEWEST_STEPS:
            return ""
        return f"  {(self._ends[-1] - self._ends[0]) / timed * (self.steps - step):.0f} s left"

    def close(self) -> None:
        self._bar.stop()


def closing_table(summary: Summary) -> str:
    """The end of a run: what was learnt, what it cost, and where it lies."""
    table = Table(title=summary.title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary.final.items():
        table.add_row(f"validation {name}", _number(value))
    for name, value in summary.baselines.items():
        table.add_row(name.replace("_", " "), _number(value))
    workers = f"{summary.unit}/s, all {summary.workers} workers"
    table.add_row(workers, f"{summary.throughput:,.0f}")
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
        of = {name: value or 0.0 for name, value in summary.exchange.items()}
        text = f"{of['bytes_per_step']:,.0f} bytes a step, exposed {of['exposed_s']:.2f} s"
        table.add_row("tokens sent to experts", f"{text}, overlap {of['overlap']:.4f}")
    if summary.reading:
        of = {name: value or 0.0 for name, value in summary.reading.items()}
        text = f"{of['read_bytes'] / 2**20:,.0f} MiB, {of['amplification']:.2f} × what was needed"
        table.add_row("read from disk by a worker", f"{text}; planned {of['planning_s']:.0f} s")
    place = ", in the host's memory" if summary.memory.host_bytes else ""
    table.add_row("extra model copies", f"{summary.extra_model_copies:g}{place}")
    table.add_row("peak memory of a worker", f"{summary.peak_memory_bytes / 2**20:,.0f} MiB")
    table.add_row("wall time", f"{summary.wall_s:.0f} s")
    # Below the table, where a narrow terminal does not cut it: it is to be copied.
    return f"{_rendered(table)}folder: {summary.folder}\n"


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


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
    validation: Validation
    """The samples that it was scored on."""


def sweep_table(outcomes: Sequence[Outcome]) -> str:
    """The end of a sweep: a line for each job, named by the overrides in which the jobs differ.
    Below the table stands where each lies, or how it has failed, and which has the lowest
    validation loss."""
    common = set.intersection(*(set(outcome.overrides) for outcome in outcomes))
    ended = [outcome.summary for outcome in outcomes if outcome.summary]
    scores = list(dict.fromkeys(name for summary in ended for name in summary.final))
    table = Table(title=f"sweep: {' '.join(o for o in outcomes[0].overrides if o in common)}")
    for head in ("job", *scores, "units/s", "overlap"):
        table.add_column(head, overflow="fold")
    below, losses = "", {}
    for outcome in outcomes:
        job = " ".join(o for o in outcome.overrides if o not in common) or "(the only one)"
        summary = outcome.summary
        if summary is None:
            table.add_row(job, *[NOTHING] * (len(scores) + 2))
            reason = _REASONS.get(outcome.status, "failed")
            below += f"{job}: {reason} (exit status {outcome.status}); see above\n"
            continue
        found = [_number(summary.final.get(name)) for name in scores]
        table.add_row(job, *found, f"{summary.throughput:,.0f}", _number(summary.overlap))
        below += f"{job}: {summary.folder}\n"
        if (loss := summary.final.get("loss")) is not None:
            losses[job] = loss
    data = {(one.summary.task, one.validation.value) for one in outcomes if one.summary}
    if len(losses) > 1 and len(data) == 1:
        best, [(_, part)] = min(losses, key=losses.__getitem__), data
        below += f"lowest validation loss: {losses[best]:.4f} with {best}"
        below += f", scored on data.validation={part}"
    return _rendered(table) + below
