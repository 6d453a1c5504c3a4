"""Figures from results/evals.csv, results/ours.csv and the laboratory's cells, as SVG.

Grey lettering on nothing reads on light and on dark ground alike.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.recipe import Column, Recipe
from recipes.tau_sweep import TAUS

_GREY = "#808080"
Rows = Sequence[dict[str, str]]


def draw(recipe: Recipe, ours: Rows, evals: Rows, scale: str, folder: Path) -> list[Path]:
    """What there is to see of one recipe; nothing of what has not run."""
    mine = [row for row in evals if row["recipe"] == recipe.name and row["scale"] == scale]
    made = []
    for column in recipe.columns:
        drawn = [row for row in mine if row["column"] == column.name]
        if drawn:
            path = folder / f"{recipe.name}_{_slug(column.name)}.svg"
            _curves(recipe, column, drawn, path)
            made.append(path)
    if recipe.name == "tau_sweep":
        found = [row for row in ours if row["recipe"] == recipe.name and row["scale"] == scale]
        if found:
            made.append(folder / "tau_sweep.svg")
            _sweep(recipe, found, made[-1])
    return made


def _curves(recipe: Recipe, column: Column, evals: Rows, path: Path) -> None:
    """Mean over the seeds, against steps and against seconds of training."""
    with _figure(path, 2) as axes:
        for row in recipe.rows:
            own = [e for e in evals if e["row"] == row.name]
            steps = sorted({int(e["step"]) for e in own})
            at = [[e for e in own if int(e["step"]) == step] for step in steps]
            values = [_mean(same, "value") for same in at]
            axes[0].plot(steps, values, marker=".", label=row.name)
            axes[1].plot([_mean(same, "train_s") for same in at], values, marker=".")
        axes[0].set_xlabel("steps")
        axes[1].set_xlabel("seconds of training")
        axes[0].set_ylabel(f"{column.name}: {column.metric.rpartition('.')[2]}")
        axes[0].legend(fontsize="x-small", labelcolor=_GREY, framealpha=0)


def _sweep(recipe: Recipe, ours: Rows, path: Path) -> None:
    with _figure(path, len(recipe.columns)) as axes:
        for axis, column in zip(axes, recipe.columns, strict=True):
            of_column = [row for row in ours if row["column"] == column.name]
            points = [
                (tau, [r for r in of_column if r["row"] == f"CO2, τ = {tau}"]) for tau in TAUS
            ]
            points = [(tau, same) for tau, same in points if same]
            means = [_mean(same, "value") for _, same in points]
            spreads = [_spread(same) for _, same in points]
            axis.errorbar([tau for tau, _ in points], means, spreads, marker="o", capsize=3)
            first = [r for r in of_column if r["row"] == recipe.rows[0].name]
            if first:
                axis.axhline(_mean(first, "value"), linestyle="--", color=_GREY)
            axis.set_xscale("log", base=2)
            axis.set_xticks(TAUS, [str(tau) for tau in TAUS])
            axis.set_xlabel(f"τ; dashed: {recipe.rows[0].name}")
            axis.set_ylabel(column.name)


class _figure:
    """Axes side by side, grey on transparent; written at the end."""

    def __init__(self, path: Path, panels: int) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        self.path, self.pyplot = path, pyplot
        self.figure, axes = pyplot.subplots(
            1, panels, figsize=(4.5 * panels, 3.4), squeeze=False, layout="constrained"
        )
        self.axes: list[Any] = list(axes[0])

    def __enter__(self) -> list[Any]:
        return self.axes

    def __exit__(self, *error: object) -> None:
        for axis in self.axes:
            axis.grid(alpha=0.3)
            axis.tick_params(colors=_GREY, which="both")
            axis.xaxis.label.set_color(_GREY)
            axis.yaxis.label.set_color(_GREY)
            for spine in axis.spines.values():
                spine.set_color(_GREY)
            axis.patch.set_alpha(0)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The same figures make the same file: no date, no random names.
        with self.pyplot.rc_context({"svg.hashsalt": "co2"}):
            self.figure.savefig(self.path, transparent=True, metadata={"Date": None})
        self.pyplot.close(self.figure)


def _mean(rows: Rows, key: str) -> float:
    return statistics.mean(float(row[key]) for row in rows)


def _spread(rows: Rows) -> float:
    values = [float(row["value"]) for row in rows]
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name.lower()).strip("_")
