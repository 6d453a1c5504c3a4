"""Values that have been collected already: in a commit, from runs that were made elsewhere."""

from collections.abc import Collection, Mapping
from pathlib import Path

from recipes.recipe import Column, Row
from recipes.registry import RECIPES
from recipes.runs import measured
from recipes.runs.cells import Cell, is_of
from recipes.runs.measured import KEY

Line = dict[str, str]
"""A value with its run."""
Key = tuple[str, ...]
"""Recipe, row, column, scale and seed."""


class Known:
    """The lines of an ours.csv, found by what they are the value of."""

    def __init__(self, path: Path) -> None:
        # In order: of several lines that serve another recipe, always the same one is found.
        self.lines = measured.in_order(measured.read(path), measured.LINE)
        self._own = {key_of(line): line for line in self.lines}
        columns = {
            (recipe.name, column.name): column
            for recipe in RECIPES.values()
            for column in recipe.columns
        }
        self._shared: dict[tuple[object, ...], Line] = {}
        """By `_figure`, for recipes that read the same from the same runs."""
        # Those last that tell what they were trained on.
        for line in sorted(self.lines, key=lambda line: bool(line["fingerprint"])):
            column = columns.get((line["recipe"], line["column"]))
            if column is not None and column.of is None:
                self._shared[_figure(line["command"], column)] = line

    def find(
        self, recipe: str, row: Row, column: Column, scale: str, seed: int, cell: Cell
    ) -> Line | None:
        """The line of this value, or of the same figure of the same run in another recipe's table.
        It counts as long as the command is the same and conf gives it the same settings. One that
        tells what it was trained on comes before one that does not."""
        own = self._own.get((recipe, row.name, column.name, scale, str(seed)))
        same = self._shared.get(_figure(cell.command, column))
        good = [line for line in (own, same) if line is not None and is_of(line, cell)]
        return max(good, key=lambda line: bool(line["fingerprint"]), default=None)

    def left(self, recipe: str, scale: str, found: Collection[Key]) -> list[Line]:
        """The lines of a recipe that are none of the values found, and that `collect` drops."""
        own = (line for line in self.lines if line["recipe"] == recipe and line["scale"] == scale)
        return [line for line in own if key_of(line) not in found]


def key_of(line: Mapping[str, object]) -> Key:
    """What a line is the value of."""
    return tuple(str(line[name]) for name in KEY)


def _figure(command: str, column: Column) -> tuple[object, ...]:
    """What is read from which run. A figure that depends on a second run is nobody else's."""
    return (command, column.metric, column.factor) if column.of is None else ()
