"""Figures of recipes as SVG: one subject a file, so that a phone shows them below each other."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from co2.catalogue import CATALOGUE
from co2.config import Blocking
from co2.record import drawing
from recipes.recipe import Recipe, Row, Rows
from recipes.tables.log_mean import LogMean

_MARKED = 0.1
"""Markers of a curve are this share of the panel's diagonal apart, or as far as evaluations are."""


def curves(recipe: Recipe, evals: Rows, stem: Path) -> Iterator[Path]:
    """Draw validation loss against steps for every column that has run, and against seconds where
    they can be compared."""
    columns = [column for column in recipe.columns if column.curve]
    for column in columns:
        drawn = [line for line in evals if line["column"] == column.name]
        title = column.name if len(columns) > 1 else recipe.title
        axes = ("step", "train_s") if recipe.undisturbed else ("step",)
        several = len({line["step"] for line in drawn}) > 1  # or a curve is a point
        for against in axes if several else ():
            path = beside(stem, column.name, "steps" if against == "step" else "seconds")
            _curve(recipe, drawn, against, path, title)
            yield path


def _curve(recipe: Recipe, evals: Rows, against: str, path: Path, title: str) -> None:
    """Draw a line for each row of the table: the mean over the seeds, in a band of one standard
    deviation to either side. Where there is a goal, a dashed line is at it."""
    found = {row: at for row in recipe.rows if (at := _evaluations(evals, row))}
    with panels(path, title, list(found)) as parts:
        looks = styles(found)
        for axis, rows in parts:
            for row in rows:
                x = [mean(same, against) for same in found[row]]
                y = [mean(same, "loss") for same in found[row]]
                axis.plot(x, y, markevery=_MARKED, **looks[row.name])
                axis.plot(x[-1:], y[-1:], **looks[row.name] | {"label": None})
                spreads = [spread(same, "loss") for same in found[row]]
                low, high = ([m + s * d for m, d in zip(y, spreads, strict=True)] for s in (-1, 1))
                colour = looks[row.name]["color"]
                axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
            if recipe.goal is not None:
                _goal(axis, _evaluations(evals, recipe.goal))
                if against == "train_s":
                    axis.set_xscale("log")
                    axis.xaxis.set_major_formatter("{x:g}")
            axis.set_xlabel("steps" if against == "step" else "seconds of training")
            axis.set_ylabel("validation loss")


def _evaluations(evals: Rows, row: Row) -> list[Rows]:
    """The evaluations of a row, step by step: at each step those of all seeds."""
    own = [line for line in evals if line["row"] == row.name]
    steps = sorted({int(line["step"]) for line in own})
    return [[line for line in own if int(line["step"]) == step] for step in steps]


def _goal(axis: Any, first: Sequence[Rows]) -> None:
    """A dashed line at the loss after the last step, with its value. Any: axes of matplotlib."""
    if first:
        loss = mean(first[-1], "loss")
        axis.axhline(loss, zorder=3, **drawing.LIMIT)
        place = {"xycoords": axis.get_yaxis_transform(), "textcoords": "offset points"}
        axis.annotate(f"goal: {loss:.2f}", (0, loss), (4, -4), verticalalignment="top", **place)


def styles(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """By name of row, how its line looks: as its method in every figure. Dashes tell rows of one
    method apart. Any: keyword arguments of matplotlib's `plot`."""
    found: dict[str, dict[str, Any]] = {}
    seen: dict[str, int] = {}
    for row in rows:
        method = _method(row)
        number = seen[method] = seen.get(method, -1) + 1
        own = drawing.LIMIT if row.limit else drawing.look(method, number)
        found[row.name] = {**own, "label": row.name}
    return found


def _method(row: Row) -> str:
    return row.overrides[0].removeprefix("method=")


def kind(row: Row) -> str:
    """The kind of a row's method by what the catalogue declares, as the title of a panel."""
    entry = CATALOGUE.get(_method(row))
    if entry is None:
        return "others"
    if entry.share < 1:
        return "send a few values or bits"
    if entry.blocking is Blocking.beyond_delay:
        return "compute while they exchange"
    return "wait for each exchange"


def lines(axis: Any, found: Mapping[Row, Mapping[Any, Sequence[float]]]) -> None:
    """A line for each row through the means over its seeds, with bars of one standard deviation.

    Any: axes of matplotlib, and places on them.
    """
    looks = styles(found)
    for row, seeds in found.items():
        if seeds:
            means = {place: statistics.fmean(values) for place, values in seeds.items()}
            bars = list(map(deviation, seeds.values()))
            drawing.points(axis, means, bars if any(bars) else None, **looks[row.name])


def bars(means: Iterable[LogMean], factor: float = 1.0) -> tuple[list[float], list[list[float]]]:
    """What these are means of, and how far their 95 % intervals reach below and above."""
    middles, below, above = [], [], []
    for mean in means:
        middle, width = factor * math.exp(mean.mean), mean.half_width or 0.0
        middles.append(middle)
        below.append(-middle * math.expm1(-width))
        above.append(middle * math.expm1(width))
    return middles, [below, above]


def reference(axis: Any, row: Row, value: float) -> None:
    """A dashed line at a row's value, which other lines are compared with. Any: as for `lines`."""
    axis.axhline(
        value, **drawing.LIMIT | {"color": styles([row])[row.name]["color"]}, label=row.name
    )


@contextmanager
def panels(
    path: Path, title: str, rows: Sequence[Row]
) -> Iterator[Sequence[tuple[Any, Sequence[Row]]]]:
    """As many panels below each other as these rows need, each with its rows. The first row and
    limits are in every panel.

    Where one panel cannot hold all rows, and their methods are of more than two kinds, each kind
    has panels of its own, with its name. Any: axes of matplotlib.
    """
    always = [row for row in rows if row is rows[0] or row.limit]
    others = [row for row in rows if row not in always]
    room = drawing.CURVES - len(always)
    kinds: dict[str, list[Row]] = {}
    for row in others:
        kinds.setdefault(kind(row), []).append(row)
    if len(others) <= room or len(kinds) <= 2:
        kinds = {"": others}
    parts = [(name, part) for name, own in kinds.items() for part in drawing.split(own, room)]
    names = [name for name, _ in parts]
    names[0] = f"{title}\n{names[0]}".rstrip()
    with drawing.panels(path, names) as axes:
        yield [(axis, [*always, *part]) for axis, (_, part) in zip(axes, parts, strict=True)]


@contextmanager
def panel(path: Path, title: str) -> Iterator[Any]:
    """A single panel. Any: axes of matplotlib."""
    with drawing.panels(path, [title]) as (axis,):
        yield axis


def beside(stem: Path, *words: str) -> Path:
    """`<stem>_words.svg`, in small letters and digits."""
    return stem.with_name(f"{stem.name}_{slug('_'.join(words))}.svg")


def slug(text: str) -> str:
    """A text as part of a file's name: small letters and digits, joined by `_`."""
    lower = text.lower()
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in lower)
    return "_".join(filter(None, plain.split("_")))


def mean(rows: Sequence[dict[str, str]], key: str = "value") -> float:
    """Mean of a figure of these rows of a results file."""
    return statistics.mean(float(row[key]) for row in rows)


def spread(rows: Sequence[dict[str, str]], key: str = "value") -> float:
    """Their standard deviation; 0 for one row."""
    return deviation([float(row[key]) for row in rows])


def deviation(values: Sequence[float]) -> float:
    """The standard deviation; 0 for one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
