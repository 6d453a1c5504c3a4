"""Cells: the runs that a table is made of. Only those without a finished run are trained."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

from co2.app.application import App
from co2.config import Config
from co2.errors import STOPPED
from co2.record.folder import read_summary, run_folder
from co2.record.provenance import of_run
from co2.train import launch
from tasks import TASKS

APP = App(conf=Path(__file__).parents[1] / "conf", tasks=TASKS)
"""As train.py is."""


class Run(Protocol):
    """What stands behind one value of a table."""

    @property
    def command(self) -> str: ...

    def config(self) -> Config:
        """Composed and checked. Raises `ConfigError`."""

    def summary(self) -> dict[str, Any] | None:
        """The figures of a finished run; None where there is something to train."""

    def source(self) -> dict[str, str]:
        """Of a finished run: commit, hardware, and where its figures lie."""


@dataclass(frozen=True)
class Cell:
    """One run, named by what a command line of train.py would say."""

    overrides: tuple[str, ...]
    recipes: tuple[str, ...] = field(default=(), compare=False)
    """Names of those that ask for it: tags of its W&B run."""

    @property
    def command(self) -> str:
        return " ".join(["python train.py", *self.overrides])

    def config(self) -> Config:
        return composed_config(self.overrides)

    def summary(self) -> dict[str, Any] | None:
        return read_summary(self.config())

    def source(self) -> dict[str, str]:
        folder = run_folder(self.config())
        return {**of_run(folder), "folder": os.path.relpath(folder)}


def once(cells: Iterable[Cell]) -> list[Cell]:
    """Every run once, with all recipes that ask for it."""
    names: dict[Cell, dict[str, None]] = {}
    for cell in cells:
        names.setdefault(cell, {}).update(dict.fromkeys(cell.recipes))
    return [replace(cell, recipes=tuple(found)) for cell, found in names.items()]


def tagged(cell: Cell) -> dict[str, str]:
    """The environment of a cell's run: W&B's own variable names the recipes."""
    tags = ",".join(filter(None, (os.environ.get("WANDB_TAGS"), *cell.recipes)))
    return {**os.environ, **({"WANDB_TAGS": tags} if tags else {})}


def run(cells: Iterable[Cell], say: Callable[[str], None] = print) -> list[Cell]:
    """Train every cell that has no finished run; those that were begun go on.

    Cells of as many workers follow each other in the same processes, which spares them the start:
    a dozen seconds on a small machine. Their peak memory is therefore that of all before them too.

    Returns:
        Those whose run failed; the others do not suffer.
    Raises:
        SystemExit: after Ctrl-C, with everything saved; the same call goes on from there.
        ConfigError: for a cell that cannot be run, before any is.
    """
    missing = [cell for cell in once(cells) if cell.summary() is None]
    failed: list[Cell] = []
    for workers in sorted({cell.config().launch.workers for cell in missing}):
        left = [cell for cell in missing if cell.config().launch.workers == workers]
        while left:
            for cell in left:
                APP.make_task(cell.config()).setup(workers)  # data are made here, once
            say(f"{len(left)} runs of {workers} workers to train; the next: {left[0].command}")
            status = launch.run(partial(_train, tuple(left)), left[0].config())
            left = [cell for cell in left if cell.summary() is None]
            if status in STOPPED:
                raise SystemExit(status)
            if status and left:
                say(f"failed with exit status {status}: {left[0].command}")
                failed.append(left.pop(0))
    return failed


@cache
def composed_config(overrides: tuple[str, ...]) -> Config:
    """What train.py makes of these overrides. Raises `ConfigError`."""
    return APP.config(overrides)


def _train(cells: Sequence[Cell], _: Config) -> None:
    """What every worker does."""
    for cell in cells:
        sys.argv = ["train.py", *cell.overrides]  # what a manifest calls the command
        with patch.dict(os.environ, tagged(cell)):
            APP.work(cell.config())
