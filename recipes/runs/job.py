"""Cells that the workers of one job make in turn: trainings whose seconds are compared at scale.

    srun --nodes=2 --ntasks-per-node=8 python -m recipes run table3 --scale paper
    torchrun --nproc-per-node=8 -m recipes run table3 --scale paper

Worlds of every size are compared on the same nodes if one job begins them one after the other:
slurm/worlds.sbatch. What is timed are the steps after a warm-up, as worker 0 has seen them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from co2.config import Config
from co2.errors import STOPPED, ConfigError, require
from co2.record.files import whole_lines
from co2.start import launch
from co2.start.identity import identity, is_first
from recipes.recipe import Column, Row
from recipes.runs.cells import APP, Cell, SummaryJSON, TrainCell

ENDLESS = ("method=local_sgd", "local_sgd.tau=1000000000")
"""The training that never communicates: local SGD with a round that never ends."""
ROUNDS = 4
"""Of a training. The first half of them compiles, connects and has no mean in flight yet."""
TAU = 12
"""Steps of a round in rows that give none, and between two lines of metrics in all others."""
TIMED_ONLY = (
    "train.eval_every=1000000",
    "checkpoint.every=0",
    "checkpoint.every_s=null",
    "checkpoint.model=false",
    "log.wandb=disabled",
)


@dataclass(frozen=True)
class JobCell(TrainCell):
    """A run of train.py that is made in turn with others."""

    workers: int = field(kw_only=True)
    """Of the job that makes it."""


@dataclass(frozen=True)
class JobColumn(Column):
    """A column whose runs are made so, at one scale alone. A row's `method=none` is `ENDLESS`."""

    workers: int = field(kw_only=True)
    scale: str = "paper"

    def takes(self, row: Row, scale: str) -> bool:
        return scale == self.scale and super().takes(row, scale)

    def cell(self, recipe: str, row: Row, scale: str, seed: int) -> JobCell:
        words = ENDLESS if "method=none" in row.overrides else row.overrides
        given = dict(word.split("=", 1) for word in words if ".tau=" in word)
        tau = TAU if words == ENDLESS else next(map(int, given.values()), TAU)
        timed = (f"train.steps={ROUNDS * tau}", f"log.every={tau}", *TIMED_ONLY)
        more = (f"launch.workers={self.workers}", *timed)
        made = super().cell(recipe, Row(row.name, (*words, *more)), scale, seed)
        assert isinstance(made, TrainCell)
        return JobCell(made.overrides, made.recipes, workers=self.workers)


def pace(run: SummaryJSON) -> float | None:
    """Units per second of all workers, in the timed rounds."""
    found = _timed(run)
    return None if found is None else found[0]


def waiting(run: SummaryJSON) -> float | None:
    """The share of the time of the timed rounds in which computation stood still for collectives;
    None where that is not known."""
    found = _timed(run)
    return None if found is None else found[1]


def slower(run: SummaryJSON, alone: SummaryJSON) -> float | None:
    """By how many percent a step computes longer, without its waiting, than one of the run
    `alone`, which never communicates."""
    own, other = _timed(run), _timed(alone)
    if own is None or other is None or own[1] is None:
        return None
    return 100 * ((1 - own[1]) * other[0] / own[0] - 1)


def _timed(run: SummaryJSON) -> tuple[float, float | None] | None:
    """Units per second and share of waiting, over intervals of equally many steps."""
    lines = [
        line
        for line in whole_lines(Path(run["folder"], "metrics.jsonl"))
        if line["kind"] == "train" and line["step"] > run["steps"] // 2
    ]
    if not lines:
        return None
    seconds = [1 / line[f"{run['unit']}_per_s"] for line in lines]  # of a unit
    shares = [line["exposed_share"] for line in lines]
    whole = sum(seconds)
    if None in shares:
        return len(lines) / whole, None
    waited = sum(one * share for one, share in zip(seconds, shares, strict=True))
    return len(lines) / whole, waited / whole


def check(cells: Iterable[Cell], recipes: Sequence[str], scale: str) -> None:
    """Refuse runs that only a job's workers make where there are none, and all others where this
    process is one of them. Raises `ConfigError`."""
    names, started = " ".join(recipes), identity() is not None
    for cell in cells:
        if started:
            hint = "workers of torchrun or srun make only what is timed in turn: start it alone"
            require(isinstance(cell, JobCell), "recipe", names, hint)
        elif isinstance(cell, JobCell) and cell.summary() is None:
            words = f"{names} --scale {scale}"
            hint = "is timed by the workers of one job: sbatch --nodes=2 --gpus-per-node=8 "
            hint += f"slurm/worlds.sbatch {words}; or torchrun --nproc-per-node=8 -m recipes run "
            raise ConfigError("recipe", names, f"{hint}{words}")


def run(cells: Iterable[JobCell], print_line: Callable[[str], None] = print) -> dict[JobCell, int]:
    """Train the cells of this job's number of workers that have no finished run, one after the
    other. Every worker calls this, and has a process group of its own for each.

    Returns:
        The exit statuses of the runs that failed, where the worker lives on.
    Raises:
        ConfigError: a cell cannot be run, before any is started.
        SystemExit: the job is told to end; the next one goes on.
    """
    me = identity()
    own = [cell for cell in dict.fromkeys(cells) if me is not None and cell.workers == me.world]
    failed: dict[JobCell, int] = {}
    if not own:
        return failed
    for cell in own:
        cell.check()
    # What failed before comes last: it must not keep others from being made.
    missing = sorted((cell for cell in own if cell.summary() is None), key=TrainCell.begun)
    told = [missing]
    # A worker may see another state of a shared folder: all do what worker 0 says.
    launch.run(partial(_tell, told), own[0].config())
    for number, cell in enumerate(told[0], start=1):
        if is_first():
            print_line(f"{number} of {len(told[0])} by {cell.workers} workers: {cell.command}")
        status = launch.run(partial(APP.work, origin=cell.origin), cell.config())
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if status in STOPPED:
            raise SystemExit(status)
        if status:
            failed[cell] = status
    return failed


def _tell(told: list[list[JobCell]], _: Config) -> None:
    dist.broadcast_object_list(told, device=torch.device("cpu"))
