"""Numbers that stand amid the sentences of a page, between `<!--=kind|…-->` and `<!--/-->`.

`python -m recipes render` fills them in, so that no number of a measurement is typed and a
sentence's form does not depend on which method is ahead. What has not run reads "not run".
"""

import math
import re
import statistics
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

from scipy.stats import spearmanr

from co2.errors import ConfigError
from co2.record.table import NOT_RUN
from recipes.recipe import Rows
from recipes.registry import RECIPES
from recipes.runs.cells import TrainCell
from recipes.studies import gap, rates, rounds
from recipes.tables import committed, equal_steps, shares
from recipes.tables.entries import Entry, by_seed, compared, entries, shared_spread
from recipes.tables.log_mean import LogMean

_MARKED = re.compile(r"(<!--=(.+?)-->).*?(<!--/-->)", re.DOTALL)


class Facts:
    """The values of one scale's rows of results/ours.csv, and of tables in that folder, as
    sentences tell them."""

    def __init__(self, ours: Rows, scale: str, results: Path) -> None:
        self._ours, self._scale, self._results = ours, scale, results
        self._entries: dict[str, list[Entry]] = {}
        self._shares: dict[str, Mapping[tuple[str, str], shares.Share]] = {}

    def fill(self, text: str) -> str:
        """The text with every marked place filled in."""
        return _MARKED.sub(lambda found: f"{found[1]}{self.told(found[2])}{found[3]}", text)

    def told(self, key: str) -> str:
        """What stands at one place, in a table with \\| for |. Raises `ConfigError` where no recipe
        or file has it."""
        kind, *words = key.replace("\\|", "|").split("|")
        try:
            return self._KINDS[kind](self, *words)
        except (KeyError, TypeError) as error:
            hint = "no recipe has this kind, row or column; mend the key on the page"
            raise ConfigError(f"<!--={kind}", "|".join(words), hint) from error

    def measured(self, recipe: str, row: str, column: str) -> str:
        """Mean ± standard deviation."""
        return self._entry(recipe, row, column).measured

    def seeds(self, recipe: str, row: str, column: str) -> str:
        """The value of each seed."""
        entry = self._entry(recipe, row, column)
        return ", ".join(f"{v:.{entry.column.digits}f}" for v in entry.values.values()) or NOT_RUN

    def above(self, recipe: str, row: str, column: str, other: str = "") -> str:
        """The difference to another row, by default the first; stars as in the tables."""
        entry = self._entry(recipe, row, column)
        of = RECIPES[recipe]
        tested = {of.rows[0].name: entry.to_first} | (
            {"Local SGD": entry.to_local} if entry.to_local is not None else {}
        )
        other = other or of.rows[0].name
        found = tested.get(other)
        if found is None:
            same = {e.row.name: e.values for e in self._all(recipe) if e.column == entry.column}
            spread = shared_spread(entry.column, same)
            found = compared(entry.values, same[other], entry.column.relative, spread)
        return NOT_RUN if found is None else found.text(entry.column.digits)

    def seeds_above(self, recipe: str, row: str, column: str, other: str) -> str:
        """In how many of the seeds that both have a row is above another."""
        one, two = (self._entry(recipe, name, column).values for name in (row, other))
        both = one.keys() & two.keys()
        return f"{sum(one[seed] > two[seed] for seed in both)} of {len(both)}" if both else NOT_RUN

    def between(self, recipe: str, part: str, row: str) -> str:
        """A row's differences to the first, from the smallest to the largest of a part, and how
        many have a star."""
        recipes = recipe.split("+")
        if not any(own.name == row for name in recipes for own in RECIPES[name].rows):
            raise KeyError(row)
        found = {
            entry.column.head.removesuffix(", loss"): entry.to_first
            for name in recipes
            for entry in self._all(name)
            if (entry.row.name, entry.column.part) == (row, part) and entry.to_first is not None
        }
        if not found:
            return NOT_RUN
        low, *_, high = sorted(found, key=lambda head: found[head].mean) * 2
        stars = sum(difference.significant for difference in found.values())
        ends = " to ".join(
            f"{found[head].mean:+z.1f} % ({head})" for head in dict.fromkeys((low, high))
        )
        return f"{ends}, with a star on {stars} of {len(found)} tasks"

    def extent(self, recipe: str, part: str) -> str:
        """The smallest and the largest mean of a part."""
        means = [e.mean for e in self._all(recipe) if e.column.part == part and e.values]
        return f"{min(means):.1f} to {max(means):.1f}" if means else NOT_RUN

    def steps(self, method: str, budget: str) -> str:
        """Steps in units of AllReduce's after so many rounds."""
        found = self._steps.get(method, {}).get(int(budget))
        return NOT_RUN if found is None else rounds.ratio_words(found)

    def growth(self, method: str, early: str, late: str) -> str:
        """By which factor the steps in units of AllReduce's change between two budgets."""
        found = self._steps.get(method, {})
        one, two = (found.get(int(budget)) for budget in (early, late))
        if one is None or two is None:
            return NOT_RUN
        logs = [log - one.logs[seed] for seed, log in two.logs.items() if seed in one.logs]
        if not logs:
            return NOT_RUN
        errors = math.hypot(one.fit_error, two.fit_error)
        mean = equal_steps.Ratio(dict(enumerate(logs)), False, errors).mean
        return f"×{mean.text('.2f')}"

    def share(self, row: str, link: str, recipe: str = "table3") -> str:
        """The share of the throughput without communication."""
        if recipe not in self._shares:
            self._shares[recipe] = shares.shares(RECIPES[recipe], self._of(recipe), "2 workers")
        found = self._shares[recipe].get((row, link))
        return NOT_RUN if found is None else found.text()

    def gap_range(self, low: str, high: str) -> str:
        """Percent above AllReduce of the settings with β + α/Λ in this range."""
        base = by_seed(self._of("gap")).get((gap.ALLREDUCE.name, gap.LOSS.name), {})
        found = [
            LogMean.of([math.log(loss / base[seed]) for seed, loss in point.losses.items()])
            for point in gap.points(self._of("gap"))
            if float(low) <= point.rule < float(high)
        ]
        means = sorted(100 * math.expm1(one.mean) for one in found)
        return f"{means[0]:+.1f} to {means[-1]:+.1f} %" if means else NOT_RUN

    def gap_rank(self) -> str:
        """Spearman's rank correlation of rule and loss below 1."""
        found = [point for point in gap.points(self._of("gap")) if point.rule < 1]
        if len(found) < 3:
            return NOT_RUN
        losses = [statistics.fmean(point.losses.values()) for point in found]
        rank = spearmanr([point.rule for point in found], losses).statistic
        return f"{rank:.2f} (n = {len(found)})"

    def replicas(self, method: str, other: str = "AllReduce") -> str:
        """The gap to another method by number of replicas, each at its best rate."""
        if not {method, other} <= {row.name for row in rates.METHODS}:
            raise KeyError(method)
        values = by_seed(self._of("rates"))

        def best(name: str, replicas: int) -> float | None:
            found = [
                loss
                for (row, column), seeds in values.items()
                if row.startswith(f"{name}, rate ") and column == rates.name(replicas)
                for loss in seeds.values()
            ]
            return min(found) if found else None

        words = []
        for number in rates.REPLICAS:
            own, base = best(method, number), best(other, number)
            if own is not None and base is not None:
                words.append(f"{100 * (own / base - 1):.1f} % with {number}")
        return ", ".join(words) or NOT_RUN

    def count(self, recipe: str, row: str, column: str) -> str:
        """How many seeds there are."""
        return str(len(self._entry(recipe, row, column).values))

    def runs(self, recipe: str, scale: str, task: str) -> str:
        """How many trainings of a task a recipe has at a scale. Nothing of it is measured."""
        cells = [cell for *_, cell in RECIPES[recipe].cells(scale)]
        made = {cell.overrides for cell in cells if isinstance(cell, TrainCell)}
        return str(sum(f"task={task}" in words for words in made))

    def table(self, file: str, word: str, *words: str) -> str:
        """What results/<file> has in a table: cells that tell a row from all others, a column."""
        *row, column = word, *words
        return committed.cell(self._results, file, row, column)

    _KINDS: Mapping[str, Callable[..., str]] = {
        "measured": measured,
        "seeds": seeds,
        "above": above,
        "seeds above": seeds_above,
        "between": between,
        "extent": extent,
        "steps": steps,
        "growth": growth,
        "share": share,
        "gap range": gap_range,
        "gap rank": gap_rank,
        "count": count,
        "runs": runs,
        "table": table,
        "replicas": replicas,
    }

    def _of(self, recipe: str) -> Rows:
        return [line for line in self._ours if line["recipe"] == recipe]

    def _all(self, recipe: str) -> list[Entry]:
        if recipe not in self._entries:
            self._entries[recipe] = entries(RECIPES[recipe], self._of(recipe), self._scale)
        return self._entries[recipe]

    def _entry(self, recipe: str, row: str, column: str) -> Entry:
        found = {(entry.row.name, entry.column.name): entry for entry in self._all(recipe)}
        return found[row, column]

    @cached_property
    def _steps(self) -> Mapping[str, Mapping[int, equal_steps.Ratio]]:
        return rounds.ratios(self._of("rounds"))
