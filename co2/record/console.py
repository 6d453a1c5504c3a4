"""What a person sees: progress while training, a table at the end."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from co2.errors import DIVERGED, PREEMPTED, REFUSED


class TrainProgress:
    """Progress of worker 0: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, title: str, steps: int, unit: str, every_s: float = 5.0) -> None:
        self.console = Console()
        self.steps, self.unit, self.title, self.every_s = steps, unit, title, every_s
        self._began = self._said = time.perf_counter()
        self._first: int | None = None
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

    def step(self, step: int, figures: dict[str, float] | None = None) -> None:
        """After every step; `figures` where there are new ones: loss, per_s, exposed_share."""
        text = ""
        if figures:
            text = (
                f"loss {figures['loss']:.3f}  {figures['per_s']:,.0f} {self.unit}/s  "
                f"exposed {_share(figures['exposed_share'])}"
            )
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
            if text:
                self._bar.update(self._task, figures=text)
            return
        self._first = step - 1 if self._first is None else self._first
        now = time.perf_counter()
        if text and (now - self._said >= self.every_s or step == self.steps):
            left = (now - self._began) / (step - self._first) * (self.steps - step)
            self.say(f"step {step}/{self.steps}  {text}  {left:.0f} s left")
            self._said = now

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def closing_table(summary: dict[str, Any]) -> str:
    """The end of a run: what was learnt, what it cost, where it lies, what to try next."""
    table = Table(title=summary["title"], title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary["final"].items():
        table.add_row(f"validation {name}", f"{value:.4f}")
    for name, value in summary["baselines"].items():
        table.add_row(name.replace("_", " "), f"{value:.4f}")
    unit, workers = summary["unit"], summary["workers"]
    table.add_row(f"{unit}/s, all {workers} workers", f"{summary['throughput']:,.0f}")
    exposed = "not measured: fully_shard keeps no clocks"
    if summary["exposed_s"] is not None:
        exposed = f"{summary['exposed_s']:.2f} s, {summary['exposed_share']:.2%} of training time"
    table.add_row("exposed communication", exposed)
    table.add_row("waiting for data", f"{summary['data_share']:.2%} of training time")
    hidden = summary["overlap"]
    none = "not measured" if summary["exposed_s"] is None else "no communication"
    table.add_row("overlap", none if hidden is None else f"{hidden:.4f}")
    table.add_row("bytes sent per step and worker", f"{summary['bytes_per_step']:,.0f}")
    apart = ", in the host's memory" if summary["memory"].get("host_bytes") else ""
    table.add_row("extra model copies", f"{summary['extra_model_copies']:g}{apart}")
    table.add_row("peak memory of a worker", f"{summary['peak_memory_bytes'] / 2**20:,.0f} MiB")
    table.add_row("wall time", f"{summary['wall_s']:.0f} s")
    table.add_row("folder", summary["folder"])
    table.add_row("try next", _next_command(summary))
    console = Console()
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def _share(value: float) -> str:
    return "not measured" if math.isnan(value) else f"{value:.1%}"


@dataclass(frozen=True)
class Outcome:
    """How a job of a sweep ended."""

    overrides: Sequence[str]
    status: int
    summary: dict[str, Any] | None
    """None where it failed."""


def sweep_table(outcomes: Sequence[Outcome]) -> str:
    """The end of a sweep: a line for each job, by the overrides in which they differ."""
    common = set.intersection(*(set(outcome.overrides) for outcome in outcomes))
    names = list(
        dict.fromkeys(name for o in outcomes for name in (o.summary or {}).get("final", {}))
    )
    table = Table(title=f"sweep: {' '.join(o for o in outcomes[0].overrides if o in common)}")
    for head in ("job", *names, "units/s", "overlap", "folder or error"):
        table.add_column(head, overflow="fold")
    for outcome in outcomes:
        own = " ".join(o for o in outcome.overrides if o not in common) or "(the only one)"
        summary = outcome.summary
        if summary is None:
            table.add_row(own, *["—"] * (len(names) + 2), _failure(outcome.status))
            continue
        final, hidden = summary["final"], summary["overlap"]
        table.add_row(
            own,
            *(f"{final[name]:.4f}" if name in final else "—" for name in names),
            f"{summary['throughput']:,.0f}",
            "—" if hidden is None else f"{hidden:.4f}",
            summary["folder"],
        )
    console = Console()
    with console.capture() as capture:
        console.print(table)
    return capture.get() + _best(outcomes, common)


def _best(outcomes: Sequence[Outcome], common: set[str]) -> str:
    """The job with the lowest validation loss; empty where there is nothing to compare."""
    losses = {
        " ".join(o for o in outcome.overrides if o not in common): outcome.summary["final"]["loss"]
        for outcome in outcomes
        if outcome.summary and outcome.summary["final"].get("loss") is not None
    }
    tasks = {outcome.summary["task"] for outcome in outcomes if outcome.summary}
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


def _next_command(summary: dict[str, Any]) -> str:
    """The baseline after anything else; after the baseline, a sweep of CO2's τ."""
    if summary["method"] == "allreduce":
        return f"python train.py -m task={summary['task']} method=co2 co2.tau=1,3,6,12,24,48"
    return f"python train.py task={summary['task']} method=allreduce"
