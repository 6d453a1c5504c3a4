"""One table from results/ours.csv and results/paper.csv: Markdown, LaTeX, CSV."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import ttest_rel

from recipes.recipe import Column, Recipe, Row

NOT_RUN, NOT_AVAILABLE = "not run", "not available"


@dataclass(frozen=True)
class Entry:
    """A cell of the table: the seeds' values, and what the paper reports."""

    row: Row
    column: Column
    values: dict[int, float]
    """By seed."""
    paper: str
    p: float | None
    """Of a paired t-test against the first row's runs of the same seeds."""
    best: bool = False

    @property
    def mean(self) -> float:
        return statistics.mean(self.values.values())

    @property
    def spread(self) -> float | None:
        """Standard deviation; None for one seed."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None

    @property
    def measured(self) -> str:
        """Mean ± standard deviation, or that nothing ran."""
        if not self.values:
            return NOT_RUN
        spread = "" if self.spread is None else f" ± {self.spread:.{self.column.digits}f}"
        return f"{self.mean:,.{self.column.digits}f}{spread}"

    @property
    def told_p(self) -> str:
        return "—" if self.p is None else f"{self.p:.3f}"


def entries(
    recipe: Recipe, ours: Sequence[dict[str, str]], paper: Sequence[dict[str, str]], scale: str
) -> list[Entry]:
    """Every cell of a recipe's table at one scale, column by column."""
    values: dict[tuple[str, str], dict[int, float]] = {}
    for row in ours:
        if row["recipe"] == recipe.name and row["scale"] == scale:
            seeds = values.setdefault((row["row"], row["column"]), {})
            seeds[int(row["seed"])] = float(row["value"])
    told = {
        (row["row"], row["column"]): row["value"] + (f" ± {row['spread']}" if row["spread"] else "")
        for row in paper
        if row["recipe"] == recipe.name
    }
    found = []
    for column in recipe.columns:
        first = values.get((recipe.rows[0].name, column.name), {})
        same = []
        for number, row in enumerate(recipe.rows):
            own = values.get((row.name, column.name), {})
            p = paired(own, first) if number else None
            same.append(
                Entry(row, column, own, told.get((row.name, column.name), NOT_AVAILABLE), p)
            )
        found += _with_best(same)
    return found


def paired(values: dict[int, float], others: dict[int, float]) -> float | None:
    """The p of a two-sided paired t-test over the seeds that both have; None for fewer than two."""
    seeds = sorted(values.keys() & others.keys())
    if len(seeds) < 2 or all(values[seed] == others[seed] for seed in seeds):
        return None
    return float(ttest_rel([values[s] for s in seeds], [others[s] for s in seeds]).pvalue)


def _with_best(column: Sequence[Entry]) -> list[Entry]:
    """Marks the best mean, where its interval of one deviation overlaps no other's."""
    ran = [entry for entry in column if entry.values]
    if len(ran) < 2 or any(entry.spread is None for entry in ran):
        return list(column)
    sign = 1 if column[0].column.lower else -1
    best = min(ran, key=lambda entry: sign * entry.mean)
    clear = all(
        abs(entry.mean - best.mean) > (entry.spread or 0) + (best.spread or 0)
        for entry in ran
        if entry is not best
    )
    return [
        Entry(e.row, e.column, e.values, e.paper, e.p, best=clear and e is best) for e in column
    ]


HEAD = ("column", "method", "measured here", "seeds", "p", "paper")


def lines(found: Sequence[Entry]) -> list[tuple[str, ...]]:
    """The table's cells as text, under `HEAD`."""
    return [
        (e.column.name, e.row.name, e.measured, str(len(e.values)), e.told_p, e.paper)
        for e in found
    ]


def markdown(found: Sequence[Entry]) -> str:
    rows = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    for entry, cells in zip(found, lines(found), strict=True):
        own = list(cells)
        own[2] = f"**{own[2]}**" if entry.best else own[2]
        rows.append(f"| {' | '.join(own)} |")
    return "\n".join(rows)


def latex(found: Sequence[Entry], caption: str) -> str:
    """A table for booktabs."""
    rows = []
    for number, (entry, cells) in enumerate(zip(found, lines(found), strict=True)):
        own = [_escaped(cell) for cell in cells]
        own[2] = rf"\textbf{{{own[2]}}}" if entry.best else own[2]
        if number and entry.column is not found[number - 1].column:
            rows.append(r"\midrule")
        rows.append(" & ".join(own) + r" \\")
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_escaped(caption)}}}",
            rf"\begin{{tabular}}{{{'l' * len(HEAD)}}}",
            r"\toprule",
            " & ".join(HEAD) + r" \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _escaped(text: str) -> str:
    for plain, written in (
        ("\\", r"\textbackslash{}"),
        ("%", r"\%"),
        ("_", r"\_"),
        ("&", r"\&"),
        ("±", r"$\pm$"),
        ("τ", r"$\tau$"),
        ("φ", r"$\varphi$"),
        ("—", "---"),
    ):
        text = text.replace(plain, written)
    return text
