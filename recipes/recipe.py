"""A recipe: rows and columns of a table, and the runs behind every cell. Recipes pick, conf
defines.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.cells import Cell

RUNS = "results/runs/recipes"
"""Where the runs of all recipes are kept: a run that two of them ask for is made once."""
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Row:
    """One way to train."""

    name: str
    """As in results/paper.csv."""
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Column:
    """One task and what is read from its runs."""

    name: str
    """As in results/paper.csv."""
    overrides: tuple[str, ...]
    metric: str
    """Of a summary: `final.top1`, `throughput`."""
    lower: bool = False
    """Whether less is better."""
    factor: float = 1.0
    """100 for a share that is told in percent."""
    digits: int = 2
    smoke: tuple[str, ...] = ()
    """More overrides at scale=smoke: shorter runs than conf's, where a recipe has many."""
    curve: bool = True
    """Whether its evaluations are drawn over the steps."""

    def value(self, summary: dict[str, Any]) -> float | None:
        found: Any = summary
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

    def cells(
        self, scale: str, seeds: Sequence[int] | None = None
    ) -> Iterator[tuple[Row, Column, int, Cell]]:
        """Every seed of every cell; all have their first seed before any has its second."""
        for seed in self.seeds if seeds is None else seeds:
            for row in self.rows:
                for column in self.columns:
                    yield row, column, seed, self.cell(row, column, scale, seed)

    def cell(self, row: Row, column: Column, scale: str, seed: int) -> Cell:
        overrides = [*column.overrides, f"scale={scale}"]
        overrides += column.smoke if scale == "smoke" else ()
        overrides += [*row.overrides, f"train.seed={seed}", f"runs={RUNS}"]
        overrides += ("log.wandb=disabled",) if scale == "smoke" else ()
        return Cell(tuple(overrides), recipes=(self.name,))
