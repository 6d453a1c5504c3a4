"""`python -m recipes again`: some values of the tables made once more, and compared.

Runs are drawn at random among those of train.py whose figures do not depend on time. They are
trained by their recorded commands in results/runs/again/<commit>, and nothing is recorded.
"""

import math
import os
import random
import shutil
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from co2.errors import require
from co2.record import provenance
from co2.record.table import Table
from recipes.recipe import Column, Recipe
from recipes.runs import cells, measured
from recipes.runs.cells import TrainCell, is_of

RUNS = Path("results/runs/again")
SAME = 1e-3
"""How much a value may differ on the same processor, relatively."""
LEAST = 10
"""Priority of these trainings, as of `nice`: they may share a machine."""
HEAD = ("value", "recorded", "again", "differs", "allowed", "fingerprint", "result")


@dataclass(frozen=True)
class Drawn:
    """A value that is made once more."""

    line: dict[str, str]
    column: Column
    cell: TrainCell
    """With a folder of its own."""
    spread: float
    """Standard deviation over the seeds of its row and column."""

    def compared(self) -> dict[str, object]:
        """A line of the table, with the columns of `HEAD`."""
        name = " ".join(self.line[key] for key in ("recipe", "column", "row"))
        then, summary = float(self.line["value"]), self.cell.summary()
        told = {"value": f"{name} {self.line['seed']}", "recorded": f"{then:.4f}"}
        now = None if summary is None else self.column.value(summary)
        if now is None:
            return {**dict.fromkeys(HEAD), **told, "result": "failed"}
        source = self.cell.source()
        same = source["hardware"] == self.line["hardware"]
        allowed = SAME * abs(then) if same else self.spread
        known = self.line["fingerprint"]
        alike = "same" if source["fingerprint"] == known else "other" if known else "unknown"
        return {
            **told,
            "again": f"{now:.4f}",
            "differs": f"{now - then:+.4f}",
            "allowed": f"{allowed:.4f}, {'same' if same else 'another'} processor",
            "fingerprint": alike,
            "result": "good" if math.isclose(now, then, rel_tol=0, abs_tol=allowed) else "differs",
        }


def again(recipes: Iterable[Recipe], out: Path, scale: str, count: int, seed: int) -> int:
    """Draw values of these recipes' tables, train them once more and print how they compare.

    Returns:
        0; 1 where a value differs, or a training failed.
    Raises:
        ConfigError: there is nothing to draw.
    """
    git = provenance.git()
    runs = RUNS / (git.get("commit", "unknown")[:7] + ("-dirty" if git.get("dirty") else ""))
    if git.get("dirty"):
        shutil.rmtree(runs, ignore_errors=True)  # of other changes
    drawn = draw(recipes, out, scale, count, seed, runs)
    hint = f"has no value of train.py at scale={scale} to make again"
    require(bool(drawn), "again", out / "ours.csv", hint)
    os.nice(max(0, LEAST - os.nice(0)))
    cells.run(one.cell for one in drawn)
    table = Table.of_records([one.compared() for one in drawn], HEAD)
    print(table.markdown())
    good = sum(row[-1] == "good" for row in table.rows)
    print(f"{good} of {len(drawn)} values come out again")
    return 0 if good == len(drawn) else 1


def draw(
    recipes: Iterable[Recipe], out: Path, scale: str, count: int, seed: int, runs: Path
) -> Sequence[Drawn]:
    """So many values at random, each of another run; all, where there are fewer. A row and column
    with one seed has none."""
    lines = {
        tuple(line[key] for key in measured.KEY): line for line in measured.read(out / "ours.csv")
    }
    found: dict[str, Drawn] = {}
    for recipe in recipes:
        for row, column, own, cell in recipe.cells(scale):
            line = lines.get((recipe.name, row.name, column.name, scale, str(own)))
            if line is None or not _repeats(column, cell) or not is_of(line, cell):
                continue
            assert isinstance(cell, TrainCell)
            values = [
                float(other["value"])
                for key, other in lines.items()
                if key[:4] == (recipe.name, row.name, column.name, scale)
            ]
            if len(values) < 2:
                continue  # a trial: nothing tells how much it may differ on another processor
            words = [word for word in cell.overrides if not word.startswith("runs=")]
            moved = replace(cell, overrides=(*words, f"runs={runs}"), recipes=("again",))
            found.setdefault(cell.command, Drawn(line, column, moved, statistics.stdev(values)))
    chosen = list(found.values())
    return random.Random(seed).sample(chosen, min(count, len(chosen)))


def _repeats(column: Column, cell: object) -> bool:
    """Whether a figure is one of learning, and its run can be made without another's."""
    learned = isinstance(column.metric, str) and column.metric.startswith("final.")
    alone = isinstance(cell, TrainCell) and not any("init_from=" in w for w in cell.overrides)
    return learned and alone and column.of is None
