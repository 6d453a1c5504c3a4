"""Cells on real, slow links: trainings of co2.lab, which needs root.

Rows and columns give the laboratory's own options beside overrides: `--workers`, `--mbit`. Seeds
are repeats of the same training, because it is time that is measured, unless a column is `seeded`.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from co2.config import Config
from co2.errors import ConfigError
from co2.record.folder import check_folder, settings_digest
from co2.record.provenance import of_run
from co2_measure.lab.measurement import measure
from co2_measure.lab.plan import check_memory
from co2_measure.lab.slow_network import check_root
from co2_measure.lab.training import TrialFailed, finished, trial_overrides
from co2_measure.lab.trial import Conditions, Trial, trial_folder
from recipes.recipe import Column, Row
from recipes.runs.cells import SummaryJSON, composed_config, own_words, tuned_words

RUNS = Path("results/runs/links")
_LONGEST = 255
"""Characters in the name of a folder: as many as file systems take."""
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

    @property
    def digest(self) -> str:
        return settings_digest(self.config())

    def config(self) -> Config:
        """The configuration of the training. Raises `ConfigError`."""
        words = trial_overrides(self.trial.method, self.overrides)
        workers = f"launch.workers={self.trial.workers}"
        return composed_config((*words, workers, f"runs={self._runs}"))

    def check(self) -> None:
        self.config()

    def summary(self) -> SummaryJSON | None:
        found = finished(self.trial, EVEN, self._runs)
        if found is not None:  # conf may have changed since
            of_trial = str(trial_folder(self.trial, EVEN, self._runs))
            same = replace(self.config(), runs=of_trial, tag=self.trial.method)
            check_folder(same, self.trial.workers, as_it_is=True)
        return found

    def source(self) -> dict[str, str]:
        folder = self.folder()
        assert folder is not None, "the run has finished"
        return {**of_run(folder), "folder": str(folder)}

    def folder(self) -> Path | None:
        """The folder of a run that has finished here."""
        summary = finished(self.trial, EVEN, self._runs)
        return None if summary is None else Path(os.path.relpath(summary["folder"]))

    def train(self) -> None:
        """Run the trial. Raises `TrialFailed`."""
        for _ in measure([self.trial], EVEN, self._runs, self.overrides):
            pass

    @property
    def _runs(self) -> Path:
        """The laboratory names its folders by trial and method; overrides need one of their own."""
        name = re.sub(r"[^\w.]+", "_", "-".join(self.overrides)) or "plain"
        if len(name) > _LONGEST:
            digest = hashlib.sha256(name.encode()).hexdigest()[:16]
            name = f"{name[: _LONGEST - len(digest) - 1]}-{digest}"
        return RUNS / name


@dataclass(frozen=True)
class LabColumn(Column):
    """A column whose runs are made in the laboratory.

    `--workers` and `--mbit` are among the overrides of the column, or of a row where rows differ in
    them.
    """

    tuned_for: str | None = None
    """The task whose tuned settings every method has; what a row gives wins over them."""
    seeded: bool = False
    """Whether every repeat trains with a seed of its own, where it matters what is learned."""

    def takes(self, row: Row, scale: str) -> bool:
        return scale == "smoke" and super().takes(row, scale)

    def cell(self, recipe: str, row: Row, scale: str, seed: int) -> LabCell:
        words = own_words((*self.overrides, *row.overrides))
        if self.tuned_for is not None:
            method, *own = row.overrides
            tuned = tuned_words(self.tuned_for, method.partition("=")[2])
            words = own_words((*self.overrides, method, *tuned, *own))
        given = dict(word.split("=", 1) for word in words)
        if self.seeded:
            given["train.seed"] = str(seed)
        workers, mbit = int(given.pop("--workers")), given.pop("--mbit")
        rate = None if mbit == "unlimited" else float(mbit)
        trial = Trial(workers, rate, given.pop("method"), seed)
        return LabCell(trial, tuple(f"{key}={value}" for key, value in given.items()))


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
        cell.check()


def run(cells: Iterable[LabCell], print_line: Callable[[str], None] = print) -> list[LabCell]:
    """Measure every cell that has no finished run. Returns those that failed."""
    missing = in_turns(cell for cell in dict.fromkeys(cells) if cell.summary() is None)
    failed = []
    for number, cell in enumerate(missing, start=1):
        print_line(f"{number} of {len(missing)} in the laboratory: {cell.command}")
        try:
            cell.train()
        except (TrialFailed, ConfigError) as error:
            print_line(f"failed: {error}")
            failed.append(cell)
    return failed


def in_turns(cells: Iterable[LabCell]) -> list[LabCell]:
    """Repeat by repeat; within one all methods on one kind of link, then on the next.

    So what is compared within a repeat was measured within minutes.
    """
    wanted = list(cells)
    links = list(dict.fromkeys((cell.trial.workers, cell.trial.mbit) for cell in wanted))

    def turn(cell: LabCell) -> tuple[int, int]:
        return cell.trial.repeat, links.index((cell.trial.workers, cell.trial.mbit))

    return sorted(wanted, key=turn)
