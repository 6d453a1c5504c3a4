"""The values of a measured table: mean and deviation over seeds, the best, a paired test."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scipy.stats import ttest_rel

from co2.record.table import NOT_AVAILABLE, NOT_RUN, NOTHING, Table
from recipes.recipe import Column, Recipe, Row, Rows

_LEAST_P = 0.001
_MEASURED = 2
"""Number of the table's column with the measured values."""
NOT_REACHED = "not reached"
"""Stands for an infinite value, such as the seconds to a loss that a run never had."""


@dataclass(frozen=True)
class Entry:
    """A line of the table: the seeds' values of a row and a column, and what the paper reports."""

    row: Row
    column: Column
    values: dict[int, float]
    """By seed."""
    paper: str
    p: float | None
    """The p of a paired t-test against the first row's runs of the same seeds."""
    best: bool = False

    @property
    def mean(self) -> float:
        return statistics.mean(self.values.values())

    @property
    def spread(self) -> float | None:
        """Standard deviation of the sample; None for one seed, or where a seed has no number."""
        finite = all(map(math.isfinite, self.values.values()))
        return statistics.stdev(self.values.values()) if finite and len(self.values) > 1 else None

    @property
    def measured(self) -> str:
        """Mean ± standard deviation, or why there is none."""
        if not self.values:
            return NOT_RUN
        if math.isinf(self.mean):
            return NOT_REACHED
        spread = "" if self.spread is None else f" ± {self.spread:,.{self.column.digits}f}"
        return f"{self.mean:,.{self.column.digits}f}{spread}"

    @property
    def p_text(self) -> str:
        if self.p is None:
            return NOTHING
        return f"{self.p:.3f}" if self.p >= _LEAST_P else f"< {_LEAST_P}"


def entries(recipe: Recipe, ours: Rows, paper: Rows) -> list[Entry]:
    """Every line of a recipe's table, column by column, from its rows of both files."""
    values: dict[tuple[str, str], dict[int, float]] = {}
    for line in ours:
        seeds = values.setdefault((line["row"], line["column"]), {})
        seeds[int(line["seed"])] = float(line["value"])
    reported = {
        (line["row"], line["column"]): line["value"]
        + (f" ± {line['spread']}" if line["spread"] else "")
        for line in paper
    }
    found = []
    for column in recipe.columns:
        first = values.get((recipe.rows[0].name, column.name), {})
        same = []
        rows = [row for row in recipe.rows if row.name not in column.without]
        for number, row in enumerate(rows):
            key = (row.name, column.name)
            own = values.get(key, {})
            p = paired(own, first) if number else None
            same.append(Entry(row, column, own, reported.get(key, NOT_AVAILABLE), p))
        found += with_best(same)
    return found


def paired(values: dict[int, float], others: dict[int, float]) -> float | None:
    """The p of a two-sided paired t-test over the seeds that both have.

    None for fewer than two seeds, and where all differences are equal, as those of counted figures
    are: then chance had no part in them. None also where a seed has no number.
    """
    seeds = sorted(values.keys() & others.keys())
    differences = [values[seed] - others[seed] for seed in seeds]
    if len(seeds) < 2 or not all(map(math.isfinite, differences)):
        return None
    if math.isclose(min(differences), max(differences), rel_tol=1e-9):
        return None
    return float(ttest_rel([values[s] for s in seeds], [others[s] for s in seeds]).pvalue)


def with_best(column: Sequence[Entry]) -> list[Entry]:
    """Mark the best mean if its interval of one deviation overlaps no other's."""
    ran = [entry for entry in column if entry.values and not entry.row.limit]
    if len(ran) < 2 or any(entry.spread is None for entry in ran):
        return list(column)
    sign = 1 if column[0].column.lower else -1
    best = min(ran, key=lambda entry: sign * entry.mean)
    clear = all(
        abs(entry.mean - best.mean) > (entry.spread or 0) + (best.spread or 0)
        for entry in ran
        if entry is not best
    )
    return [replace(entry, best=clear and entry is best) for entry in column]


def measured(recipe: Recipe, ours: Rows, paper: Rows, scale: str) -> Table:
    """The table of a recipe, from its rows of results/ours.csv at this scale and of paper.csv."""
    found = entries(recipe, ours, paper)
    machines = "; ".join(sorted({line["hardware"] for line in ours}))
    where = f"measured here ({scale}{', ' if machines else ''}{machines})"
    return Table(
        name=recipe.name if scale == "smoke" else f"{recipe.name}_{scale}",
        title=f"{recipe.title} (scale={scale})",
        text=f"{recipe.text} Measured here: mean ± standard deviation over the seeds; bold where "
        f"the best interval overlaps no other; p: paired t-test over the same seeds against "
        f"{recipe.rows[0].name}. Paper: results/paper.csv, at the paper's own scale.",
        head=("of", "method", where, "seeds", "p", "paper"),
        rows=[
            (e.column.name, e.row.name, e.measured, str(len(e.values)), e.p_text, e.paper)
            for e in found
        ],
        best=frozenset((at, _MEASURED) for at, entry in enumerate(found) if entry.best),
        source=origin(recipe, ours, scale),
    )


def origin(recipe: Recipe, ours: Rows, scale: str) -> str:
    """Number and commits of the runs behind a table, and the command that repeats them."""
    again = f"`python -m recipes run {recipe.name} --scale {scale}`"
    if not ours:
        return f"Nothing has run: {again}."
    commits = sorted({line["commit"] for line in ours})
    mixed = ", a mixture" if len(commits) > 1 else ""
    runs = len({(line["folder"], line["command"]) for line in ours})
    return (
        f"{runs} runs: results/ours.csv has folder and command of each. Commit "
        f"{', '.join(commits)}{mixed}. Again: {again}."
    )
