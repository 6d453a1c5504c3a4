"""Recipes whose settings are tuned first: the trials are a recipe of their own.

Trials are collected and committed like every other value, so a table's settings can be traced to
them; the choice is made again from these whenever the recipe is used.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from recipes.recipe import Column, Recipe, Row
from recipes.runs import measured
from recipes.runs.cells import Cell, is_of

OURS = Path("results/ours.csv")
"""Where trials are looked up that were made elsewhere."""
TUNING = ("data.validation=tuning",)
"""Overrides of trials: the half of the validation data that no table shows."""
TUNING_SEED = 1000
"""The seed of trials, which no table shows."""


def at_rates(row: Row, rates: Sequence[str]) -> tuple[Row, ...]:
    """A trial of the row with each of these learning rates."""
    return tuple(
        Row(f"{row.name}, rate {rate}", (*row.overrides, f"optim.lr={rate}")) for rate in rates
    )


def trial_column(name: str, overrides: Sequence[str], without: tuple[str, ...] = ()) -> Column:
    """A column of trials: the validation loss on the half of the data that no table shows."""
    return Column(
        name,
        (*overrides, *TUNING),
        "final.loss",
        lower=True,
        digits=4,
        curve=False,
        without=without,
    )


@dataclass(frozen=True)
class TunedRecipe(Recipe):
    """A recipe that trains what won in its trials.

    A row is tuned for a column once all its trials have a value. Until then its cells are missing
    from `cells`. At a scale that the trials do not have, rows are as they are.
    """

    grids: Mapping[str, tuple[Row, ...]] = field(kw_only=True)
    """By row, its trials. Rows without a grid have nothing to tune."""
    tuned_in: Mapping[str, Column] = field(kw_only=True)
    """By column, the column of trials in which its settings are chosen, by the lowest value. A
    trial that it is `without` is not asked for. Where a column is not named, rows are as they are.
    """
    trial_seed: int = field(default=TUNING_SEED, kw_only=True)

    def __post_init__(self) -> None:
        assert not self.tuned, "it has trials of its own"

    @cached_property
    def trials(self) -> Recipe:
        """The recipe of the trials, with the rows that they are compared with."""
        columns = tuple(dict.fromkeys(self.tuned_in.values()))
        bases = [self.row(column.of) for column in columns if column.of is not None]
        rows = dict.fromkeys((*bases, *(trial for grid in self.grids.values() for trial in grid)))
        return Recipe(
            name=f"{self.name}_trials",
            title=f"{self.title}: trials",
            text=f"The settings that the recipe {self.name} chooses from, on a seed and validation "
            "data that its table does not show.",
            rows=tuple(rows),
            columns=columns,
            seeds=(self.trial_seed,),
            scales=("smoke",),
            undisturbed=self.undisturbed,
        )

    def cells(
        self, scale: str, seeds: Sequence[int] | None = None
    ) -> Iterator[tuple[Row, Column, int, Cell]]:
        chosen = self.chosen(scale)
        for seed in self.seeds if seeds is None else seeds:
            for row, column in self.places(scale):
                tuned = chosen[row.name, column.name]
                if tuned is not None:
                    yield row, column, seed, column.cell(self.name, tuned, scale, seed)

    def cell(self, row: Row, column: Column, scale: str, seed: int) -> Cell:
        """The run behind one value. Raises `LookupError` while the trials are not complete."""
        tuned = self._chosen(row, column, scale, self._elsewhere(scale))
        if tuned is None:
            raise LookupError(
                f"{row.name}, {column.name}: trials of {self.trials.name} are missing"
            )
        return column.cell(self.name, tuned, scale, seed)

    def decided(self, row: Row, column: Column, scale: str) -> bool:
        """Whether the trials of a row and column are complete."""
        return self._chosen(row, column, scale, self._elsewhere(scale)) is not None

    def undecided(self, scale: str) -> int:
        """The number of places in the table whose trials are not complete."""
        return sum(tuned is None for tuned in self.chosen(scale).values())

    def chosen(self, scale: str) -> dict[tuple[str, str], Row | None]:
        """By names of row and column: the row with the settings that won, None while unknown."""
        elsewhere = self._elsewhere(scale)
        return {
            (row.name, column.name): self._chosen(row, column, scale, elsewhere)
            for row, column in self.places(scale)
        }

    def _chosen(
        self,
        row: Row,
        column: Column,
        scale: str,
        elsewhere: Mapping[tuple[str, str], dict[str, str]],
    ) -> Row | None:
        trials, seed = self.trials, self.trial_seed
        grid, place = self.grids.get(row.name, ()), self.tuned_in.get(column.name)
        if not grid or place is None or scale not in trials.scales:
            return row
        values: dict[Row, float] = {}
        for trial in (trial for trial in grid if place.takes(trial, scale)):
            value = trials.value(trial, place, scale, seed)
            if value is None:
                cell = trials.cell(trial, place, scale, seed)
                line = elsewhere.get((trial.name, place.name))
                value = float(line["value"]) if line is not None and is_of(line, cell) else None
            if value is None:
                return None
            values[trial] = value
        won = min(values, key=values.__getitem__)
        # The row's own settings follow the trial's, and so win over them.
        return replace(row, overrides=(*won.overrides, *row.overrides[1:]))

    def _elsewhere(self, scale: str) -> dict[tuple[str, str], dict[str, str]]:
        """Recorded lines of the trials, by row and column."""
        return {
            (line["row"], line["column"]): line
            for line in measured.read(OURS)
            if (line["recipe"], line["scale"], line["seed"])
            == (self.trials.name, scale, str(self.trial_seed))
        }
