"""A recipe: rows and columns of a table, and the runs behind every cell. Recipes pick, conf
defines.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from co2.record.table import Table
from recipes.cells import Cell, Run

RUNS = "results/runs/recipes"
"""Where the runs of all recipes are kept: a run that two of them ask for is made once."""
SEEDS = (0, 1, 2)
SCALES = ("smoke", "gpu", "paper")

Rows = Sequence[dict[str, str]]
"""Of results/ours.csv or results/paper.csv."""


@dataclass(frozen=True)
class Row:
    """One way to train."""

    name: str
    """As in results/paper.csv."""
    overrides: tuple[str, ...]
    limit: bool = False
    """No method, but what bounds them all: never the best."""


@dataclass(frozen=True)
class Column:
    """One task and what is read from its runs."""

    name: str
    """As in results/paper.csv."""
    overrides: tuple[str, ...]
    metric: str | Callable[[dict[str, Any]], float | None]
    """Of a summary: `final.top1`, `throughput`, or a function of it."""
    lower: bool = False
    """Whether less is better."""
    factor: float = 1.0
    """100 for a share that is told in percent."""
    digits: int = 2
    smoke: tuple[str, ...] = ()
    """More overrides at scale=smoke: shorter runs than conf's, where a recipe has many."""
    curve: bool = True
    """Whether its evaluations are drawn over the steps."""
    of: str | None = None
    """The name of a row: values are then told in percent of that row's, seed by seed."""

    def value(self, summary: dict[str, Any]) -> float | None:
        if callable(self.metric):
            found: Any = self.metric(summary)
        else:
            found = summary
            for key in self.metric.split("."):
                found = found.get(key) if isinstance(found, dict) else None
        return None if found is None else found * self.factor


@dataclass(frozen=True)
class Recipe:
    """Everything is compared with the first row, seed by seed."""

    name: str
    title: str
    text: str
    """What to know when reading it; the module's head says what it costs."""
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    seeds: tuple[int, ...] = SEEDS
    scales: tuple[str, ...] = SCALES
    """Where it can be run."""
    draw: Callable[[Rows, Path], Iterable[Path]] | None = None
    """Figures of its own: from its rows of results/ours.csv, to files whose names begin as given.
    Returns those that there are."""
    beside: Callable[[Rows], Iterable[Table]] | None = None
    """Tables that nobody has measured, from its rows of results/paper.csv."""

    def cells(
        self, scale: str, seeds: Sequence[int] | None = None
    ) -> Iterator[tuple[Row, Column, int, Run]]:
        """Every seed of every cell; all have their first seed before any has its second."""
        for seed in self.seeds if seeds is None else seeds:
            for row in self.rows:
                for column in self.columns:
                    yield row, column, seed, self.cell(row, column, scale, seed)

    def cell(self, row: Row, column: Column, scale: str, seed: int) -> Run:
        overrides = [*column.overrides, f"scale={scale}"]
        overrides += column.smoke if scale == "smoke" else ()
        overrides += [*row.overrides, f"train.seed={seed}", f"runs={RUNS}"]
        overrides += ("log.wandb=disabled",) if scale == "smoke" else ()
        return Cell(tuple(overrides), recipes=(self.name,))

    def value(self, row: Row, column: Column, scale: str, seed: int) -> float | None:
        """What the finished run of a cell gives; None where there is none, or none to compare."""
        summary = self.cell(row, column, scale, seed).summary()
        value = None if summary is None else column.value(summary)
        if value is None or column.of is None:
            return value
        other = next(row for row in self.rows if row.name == column.of)
        base = self.cell(other, column, scale, seed).summary()
        whole = None if base is None else column.value(base)
        return None if whole is None else 100 * value / whole
