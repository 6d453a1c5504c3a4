"""Recipes on real, slow links: their cells are trainings of co2.lab, which needs root.

A row names the method as for train.py, a column gives the laboratory's own options. Seeds are
repeats: the same training again, for it is time that is measured.
"""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from co2.config import Config
from co2.errors import ConfigError
from co2.lab.measurement import measure
from co2.lab.plan import check_memory
from co2.lab.slow_network import check_root
from co2.lab.training import TrialFailed, finished, trial_overrides
from co2.lab.trial import Conditions, Trial
from co2.record.provenance import of_run
from recipes.cells import composed_config
from recipes.collect import read
from recipes.recipe import Column, Recipe, Row

RUNS = Path("results/runs/links")
KEPT = (Path("results/lab/cells.csv"), Path("results/lab/four/cells.csv"))
"""What the laboratory has measured before, of trainings that have no further overrides."""
EVEN = Conditions()


@dataclass(frozen=True)
class LabCell:
    """One training with every worker on a link of its own."""

    trial: Trial
    overrides: tuple[str, ...]

    @property
    def command(self) -> str:
        words = [f"--workers={self.trial.workers}", f"--mbit={self.trial.rate}"]
        words += [f"--methods={self.trial.method}", f"--repeats={self.trial.repeat + 1}"]
        return " ".join(["python -m co2.lab", *words, *self.overrides])

    def config(self) -> Config:
        words = trial_overrides(self.trial.method, self.overrides)
        workers = f"launch.workers={self.trial.workers}"
        return composed_config((*words, workers, f"runs={self._runs}"))

    def summary(self) -> dict[str, Any] | None:
        return finished(self.trial, EVEN, self._runs) or self._kept()

    def source(self) -> dict[str, str]:
        folder = self.folder()
        if folder is not None:
            return {**of_run(folder), "folder": str(folder)}
        kept = self._kept()
        assert kept is not None, "of a finished run"
        return {name: kept[name] for name in ("commit", "hardware", "folder")}

    def folder(self) -> Path | None:
        """Of a run that has finished here."""
        summary = finished(self.trial, EVEN, self._runs)
        return None if summary is None else Path(os.path.relpath(summary["folder"]))

    def train(self) -> None:
        """Raises `TrialFailed`."""
        for _ in measure([self.trial], EVEN, self._runs, self.overrides):
            pass

    @property
    def _runs(self) -> Path:
        """The laboratory's folders are named by cell and method, not by overrides."""
        return RUNS / (re.sub(r"[^\w.]+", "_", "-".join(self.overrides)) or "plain")

    def _kept(self) -> dict[str, Any] | None:
        trial = self.trial
        key = (str(trial.workers), trial.rate, trial.method, str(trial.repeat))
        return None if self.overrides else _measured_before().get(key)


@dataclass(frozen=True)
class LabRecipe(Recipe):
    """A recipe whose cells are measured in the laboratory."""

    scales: tuple[str, ...] = ("smoke",)

    def cell(self, row: Row, column: Column, scale: str, seed: int) -> LabCell:
        method, *overrides = row.overrides
        given = dict(word.split("=", 1) for word in column.overrides)
        mbit = given.pop("--mbit")
        trial = Trial(
            int(given.pop("--workers")),
            None if mbit == "unlimited" else float(mbit),
            method.removeprefix("method="),
            seed,
        )
        return LabCell(trial, (*overrides, *(f"{key}={value}" for key, value in given.items())))


def check(cells: Iterable[LabCell]) -> None:
    """Refuse what this machine cannot measure, before anything is. Raises `ConfigError`."""
    missing = [cell for cell in cells if cell.summary() is None]
    if not missing:
        return
    try:
        check_root()
    except ConfigError as error:
        hint = f"{error.hint}, or name recipes that have nothing to measure on slow links"
        raise ConfigError(error.key, error.value, hint) from None
    check_memory(max(cell.trial.workers for cell in missing))
    for cell in missing:
        cell.config()


def run(cells: Iterable[LabCell], say: Callable[[str], None] = print) -> list[LabCell]:
    """Measure every cell that has no finished run. Returns those that failed."""
    missing = [cell for cell in dict.fromkeys(cells) if cell.summary() is None]
    failed = []
    for number, cell in enumerate(missing, start=1):
        say(f"{number} of {len(missing)} in the laboratory: {cell.command}")
        try:
            cell.train()
        except (TrialFailed, ConfigError) as error:
            say(f"failed: {error}")
            failed.append(cell)
    return failed


def _measured_before() -> dict[tuple[str, ...], dict[str, Any]]:
    """Rows of `KEPT` by workers, rate, method and repeat, with the figures of a summary."""
    found = {}
    for path in KEPT:
        for row in read(path):
            figures = {name: float(row[name]) for name in ("throughput", "exposed_share")}
            counts = {name: int(row[name]) for name in ("workers", "steps")}
            key = (row["workers"], row["mbit"], row["method"], row["repeat"])
            found[key] = {**row, **figures, **counts, "folder": str(path)}
    return found
