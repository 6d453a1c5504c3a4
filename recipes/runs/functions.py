"""Cells that a function of the recipe trains by itself, without train.py.

For experiments that are no run of the application: a simulation of many replicas in one process, or
a model of its own. What they share with every other cell is a folder with summary.json and
manifest.json, and with these the tables.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from co2.atomic import write_durably
from co2.errors import require
from co2.record.provenance import Origin, manifest, of_run
from recipes.recipe import RUNS, Column, Row
from recipes.runs.cells import SummaryJSON, read_summary


@dataclass(frozen=True)
class FunctionCell:
    """One training of a recipe's function."""

    recipe: str
    overrides: tuple[str, ...]
    """`key=value` words, which the function understands."""
    seed: int
    train: "Trainer" = field(compare=False)
    version: int = field(default=1, compare=False)
    """Of the function's code, for the fingerprint."""

    @property
    def command(self) -> str:
        """What trains every cell of this seed; the settings of this one follow as a comment."""
        words = f"python -m recipes run {self.recipe} --seeds {self.seed}"
        return f"{words}  # {' '.join(self.overrides)}"

    @property
    def folder(self) -> Path:
        settings = re.sub(r"[^\w.+-]+", "_", "-".join(self.overrides))
        return Path(RUNS, self.recipe, settings, f"seed{self.seed}")

    @property
    def settings(self) -> dict[str, Any]:
        """The overrides by their keys. Any: YAML's own types, so `2` is a number."""
        words = (word.split("=", 1) for word in self.overrides)
        return {key: yaml.safe_load(value) for key, value in words}

    @property
    def digest(self) -> str:
        return ""

    def check(self) -> None:
        require(len(self.folder.parent.name) < 256, "recipe", self.recipe, "has too many settings")

    def summary(self) -> SummaryJSON | None:
        return read_summary(self.folder)

    def source(self) -> dict[str, str]:
        return {**of_run(self.folder), "folder": os.path.relpath(self.folder)}

    def finish(self, final: dict[str, float], workers: int, steps: int) -> None:
        """Write the run's folder; summary.json comes last, for its presence means: finished.

        Args:
            final: the figures after training, as in a summary of train.py.
            workers: number of replicas.
            steps: number of inner steps of each.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        known = manifest(workers, Origin(self.command), fingerprint={})
        known["fingerprint"] = {"task": self.version}
        write_durably(self.folder / "manifest.json", json.dumps(known, indent=1))
        summary = {"final": final, "workers": workers, "steps": steps, "seed": self.seed}
        write_durably(self.folder / "summary.json", json.dumps(summary, indent=1))


Trainer = Callable[[Sequence[FunctionCell]], None]
"""Trains these cells one after the other, and calls `finish` of each when it is done."""


@dataclass(frozen=True)
class FunctionColumn(Column):
    """A column whose runs are made by a function."""

    train: Trainer = field(kw_only=True)
    version: int = field(default=1, kw_only=True)
    """Of the function's code. Its author raises it when results change."""

    def cell(self, recipe: str, row: Row, scale: str, seed: int) -> FunctionCell:
        words = (*self.overrides, *row.overrides)
        return FunctionCell(recipe, words, seed, self.train, self.version)


def run(
    cells: Iterable[FunctionCell], print_line: Callable[[str], None] = print
) -> list[FunctionCell]:
    """Train every cell that has no finished run. Returns those that have none afterwards."""
    missing = [cell for cell in dict.fromkeys(cells) if cell.summary() is None]
    for train in dict.fromkeys(cell.train for cell in missing):
        same = [cell for cell in missing if cell.train is train]
        print_line(f"{len(same)} trainings of {same[0].recipe}; the first: {same[0].command}")
        train(same)
    return [cell for cell in missing if cell.summary() is None]
