"""A recipe: rows and columns of a table, and the run behind every value.

Recipes pick runs; the values of their settings are conf's.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from co2.record.table import Table
from recipes.runs.cells import Cell, SummaryJSON, TrainCell, own_words

RUNS = "results/runs/recipes"
"""Where the runs of all recipes are kept: a run that two of them use is made once."""
SEEDS = (0, 1, 2)
SCALES = ("smoke", "gpu", "node", "paper")
NODE = 8
"""Workers of a run at scale=paper, unless its column has others: a node's GPUs."""
SHARED = 4
"""Workers of a run at scale=gpu. They share the GPU: one replica has nobody to meet."""
FASHION = "data.path=data/fashion_mnist"
FASHION_MNIST = {task: (FASHION, f"{task}.flip=true") for task in ("resnet50", "vit")}
"""By task that learns pictures: overrides with which it trains on Fashion-MNIST at scale=smoke;
conf's digits tell no methods apart."""
LOSSES = ("final.loss", "final.cross_entropy", "final.perplexity")
"""Metrics whose differences are shown in percent. Others are shares already, or counts and seconds,
which are shown as they are."""

Rows = Sequence[dict[str, str]]
"""Rows of results/ours.csv or results/paper.csv."""


@dataclass(frozen=True)
class Row:
    """One way to train; the first override names the method."""

    name: str
    """As in results/paper.csv."""
    overrides: tuple[str, ...]
    limit: bool = False
    """Not a method but the bound of them all, such as no communication: never marked as best."""
    smoke: tuple[str, ...] = ()
    """Further overrides at scale=smoke."""


@dataclass(frozen=True)
class Column:
    """A task, the kind of run, and the figure that is read from the runs: here, of train.py."""

    name: str
    """As in results/paper.csv."""
    overrides: tuple[str, ...]
    metric: str | Callable[[SummaryJSON], float | None]
    """A path in the summary, such as `final.top1` or `throughput`, or a function of it."""
    lower: bool = False
    """Whether less is better."""
    factor: float = 1.0
    """100 for a share that is shown in percent."""
    digits: int = 2
    smoke: tuple[str, ...] = ()
    """Further overrides at scale=smoke, for shorter runs than conf's where a recipe has many."""
    paper: tuple[str, ...] = ()
    """Further overrides at scale=paper."""
    curve: bool = True
    """Whether its validation losses are drawn over steps and seconds."""
    of: str | None = None
    """Name of the row that every run is compared with, seed by seed."""
    compare: Callable[[SummaryJSON, SummaryJSON], float | None] | None = None
    """The value from a run's summary and that of the row `of`; by default, the ratio in percent."""
    without: tuple[str, ...] = ()
    """Names of the rows that cannot be run with it, as 1-bit Adam where a task trains with SGD."""
    without_large: tuple[str, ...] = ()
    """Names of further rows that cannot at other scales than smoke, where conf's settings are
    others."""
    scales: tuple[str, ...] = SCALES
    """The scales at which it can be run."""
    part: str = ""
    """What the columns beside it have in common, as in its name: a task, a number of workers. Every
    part of a recipe is printed as a table of its own, with this in its title."""

    @property
    def head(self) -> str:
        """The name without the part, which the title of the table has."""
        rest = self.name.replace(self.part, "") if self.part else self.name
        return rest.strip(" ,:") or self.name

    @property
    def relative(self) -> bool:
        """Whether differences are shown in percent: those of losses are."""
        return self.metric in LOSSES

    def takes(self, row: Row, scale: str) -> bool:
        """Whether the row can be run with it."""
        large = () if scale == "smoke" else self.without_large
        return scale in self.scales and row.name not in (*self.without, *large)

    def cell(self, recipe: str, row: Row, scale: str, seed: int) -> Cell:
        """The run of this column and a row."""
        workers = {"gpu": SHARED, "paper": NODE}.get(scale)
        overrides = [] if workers is None else [f"launch.workers={workers}"]
        overrides += [*self.overrides, f"scale={scale}"]
        overrides += {"smoke": self.smoke, "paper": self.paper}.get(scale, ())
        overrides += [*row.overrides, *(row.smoke if scale == "smoke" else ())]
        overrides += [f"train.seed={seed}", f"runs={RUNS}"]
        overrides += ("log.wandb=disabled",) if scale == "smoke" else ()
        return TrainCell(own_words(overrides), recipes=(recipe,))

    def value(self, summary: SummaryJSON, base: SummaryJSON | None = None) -> float | None:
        """The figure of a run; `base` is the summary of the row `of`. None: it has no such figure.

        A figure that the run never reached, such as the seconds to some loss, is infinite.
        """
        if self.of is None:
            return self._read(summary)
        if base is None:
            return None
        if self.compare is not None:
            return self.compare(summary, base)
        value, whole = self._read(summary), self._read(base)
        return None if value is None or whole is None else 100 * value / whole

    def _read(self, summary: SummaryJSON) -> float | None:
        found: Any = summary  # whatever lies on the path, as long as it is followed
        if callable(self.metric):
            found = self.metric(summary)
        else:
            for key in self.metric.split("."):
                found = found.get(key) if isinstance(found, dict) else None
        return None if found is None else found * self.factor


@dataclass(frozen=True)
class Recipe:
    """An experiment. Every row is compared with the first one and local SGD's, seed by seed."""

    name: str
    title: str
    text: str
    """What to know when reading the table; the head of the recipe's module tells its cost."""
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    seeds: tuple[int, ...] = SEEDS
    scales: tuple[str, ...] = SCALES
    """The scales at which it can be run."""
    draw: Callable[[Rows, Path], Iterable[Path]] | None = None
    """Draws figures of its own. It gets this recipe's rows of results/ours.csv and the beginning of
    the figures' file names, and returns the files that there are."""
    beside: Callable[[Rows, Rows], Iterable[Table]] | None = None
    """Further tables, made from this recipe's rows of results/ours.csv and of results/paper.csv."""
    listed: bool = True
    """Whether every value is in a table; not where `beside` has a shorter one of them all."""
    compared: bool = True
    """Whether there are tables of these comparisons; not where rows are of different questions."""
    tuned: bool = False
    """Whether runs of train.py have the settings that `python -m recipes tune` has found for their
    task and method at scale=smoke. Runs for which there are none yet are left out."""
    goal: Row | None = None
    """The row whose final loss the others are to reach: a line in the figures, whose seconds are
    then on a logarithmic axis."""
    undisturbed: bool = False
    """Whether the machine did nothing else during its runs, so that their seconds can be compared.
    Losses are drawn over seconds only then."""

    def cells(
        self, scale: str, seeds: Sequence[int] | None = None
    ) -> Iterator[tuple[Row, Column, int, Cell]]:
        """Every seed of every value; all have their first seed before any has its second."""
        for seed in self.seeds if seeds is None else seeds:
            for row, column in self.places(scale):
                if self.decided(row, column, scale):
                    yield row, column, seed, self.cell(row, column, scale, seed)

    def places(self, scale: str) -> Iterator[tuple[Row, Column]]:
        """Every row with every column that it can be run with."""
        for row in self.rows:
            for column in self.columns:
                if column.takes(row, scale):
                    yield row, column

    def cell(self, row: Row, column: Column, scale: str, seed: int) -> Cell:
        """The run behind one value."""
        made = column.cell(self.name, row, scale, seed)
        if self.tuned and scale == "smoke" and isinstance(made, TrainCell):
            made = replace(made, overrides=own_words((*made.overrides, "tuned=true")))
        return made

    def decided(self, row: Row, column: Column, scale: str) -> bool:
        """Whether the settings of a row and column are known, or have to be tuned first."""
        made = self.cell(row, column, scale, self.seeds[0])
        return not isinstance(made, TrainCell) or made.is_tuned()

    def undecided(self, scale: str) -> int:
        """The number of places in the table whose settings have to be tuned first."""
        return sum(not self.decided(*place, scale) for place in self.places(scale))

    def row(self, name: str) -> Row:
        """The row of this name."""
        return next(row for row in self.rows if row.name == name)

    def column(self, name: str) -> Column:
        """The column of this name."""
        return next(column for column in self.columns if column.name == name)

    def value(self, row: Row, column: Column, scale: str, seed: int) -> float | None:
        """The value of a finished run; None without one, or without the one to compare it with."""
        summary = self.cell(row, column, scale, seed).summary()
        base = None
        if column.of is not None:
            base = self.cell(self.row(column.of), column, scale, seed).summary()
        return None if summary is None else column.value(summary, base)
