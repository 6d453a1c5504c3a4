"""Figures as SVG: one panel a file, so that a phone shows them below each other.

Grey lettering on a transparent ground can be read on a light and on a dark page.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.recipe import Recipe, Row, Rows

_GREY = "#808080"
_MARKERS = "os^Dv<>P*X"
_MARKED = 0.1
"""Markers of a curve are this share of the panel's diagonal apart, or as far as evaluations are."""
_LETTERS = 12
"""Points, of which a panel is 324 wide: a phone shows them about as large as the page's words."""
_LEGEND = 48
"""Letters that fit into a line of the legend, which has one column where two have more."""


def curves(recipe: Recipe, evals: Rows, stem: Path) -> Iterator[Path]:
    """Draw validation loss against steps for every column that has run, and against seconds where
    they can be compared."""
    columns = [column for column in recipe.columns if column.curve]
    for column in columns:
        drawn = [line for line in evals if line["column"] == column.name]
        title = column.name if len(columns) > 1 else recipe.title
        axes = ("step", "train_s") if recipe.undisturbed else ("step",)
        for against in axes if drawn else ():
            path = beside(stem, column.name, "steps" if against == "step" else "seconds")
            _curve(recipe, drawn, against, path, title)
            yield path


def _curve(recipe: Recipe, evals: Rows, against: str, path: Path, title: str) -> None:
    """Draw a line for each row of the table: the mean over the seeds, in a band of one standard
    deviation to either side. Where there is a goal, a dashed line is at it."""
    with panel(path, title) as axis:
        for number, row in enumerate(recipe.rows):
            at = _evaluations(evals, row)
            if at:
                x = [mean(same, against) for same in at]
                y = [mean(same, "loss") for same in at]
                spreads = [spread(same, "loss") for same in at]
                axis.plot(x, y, markevery=_MARKED, **style(number, row.name))
                if any(spreads):
                    low, high = (
                        [m + s * d for m, d in zip(y, spreads, strict=True)] for s in (-1, 1)
                    )
                    axis.fill_between(x, low, high, color=f"C{number}", alpha=0.2, linewidth=0)
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
        axis.axhline(loss, zorder=3, **LIMIT)
        place = {"xycoords": axis.get_yaxis_transform(), "textcoords": "offset points"}
        axis.annotate(f"goal: {loss:.2f}", (0, loss), (4, -4), verticalalignment="top", **place)


def style(number: int, label: str) -> dict[str, Any]:
    """The line style of the row with this number: the same in every figure of a recipe.

    Any: keyword arguments of matplotlib's `plot`.
    """
    marker = _MARKERS[number % len(_MARKERS)]
    return {"color": f"C{number}", "marker": marker, "markersize": 4, "label": label}


LIMIT = {"color": _GREY, "linestyle": "--"}
"""The style of a line that others are compared with."""


@contextmanager
def panel(path: Path, title: str) -> Iterator[Any]:
    """Axes with grey lettering on a transparent ground, written to the file at the end.

    Any: matplotlib is imported only here, and its axes carry no useful types.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context({"font.size": _LETTERS}):
        figure = Figure(figsize=(4.5, 3.4), layout="constrained")
        FigureCanvasSVG(figure)
        axis = figure.subplots()
        yield axis
        axis.set_title(title, fontsize="medium")
        axis.grid(alpha=0.3)
        labelled = axis.get_legend_handles_labels()[1]
        if labelled:
            half = -(-len(labelled) // 2)
            halves = [labelled[:half], labelled[half:]]
            broadest = sum(max(map(len, labels), default=0) for labels in halves)
            columns = 2 if broadest <= _LEGEND else 1
            figure.set_figheight(3.4 + 0.17 * -(-len(labelled) // columns))
            figure.legend(
                loc="outside lower center",
                ncols=columns,
                fontsize=0.75 * _LETTERS,
                frameon=False,
                labelspacing=0.2,
                handlelength=1.5,
                columnspacing=1,
            )
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib. The same figure makes the same file: no date, no random names.

    Its text stays text, so that a page can colour it.
    """
    from matplotlib import rc_context
    from matplotlib.text import Text

    for axis in figure.axes:
        axis.tick_params(colors=_GREY, which="both")
        for spine in axis.spines.values():
            spine.set_color(_GREY)
    for text in figure.findobj(Text):
        text.set_color(_GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    # One name for the font, because a list of them would stand beside every word of the file.
    font = ["DejaVu Sans"]
    with rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none", "font.sans-serif": font}):
        figure.savefig(path, transparent=True, metadata={"Date": None})


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
    """Standard deviation; 0 for one row."""
    values = [float(row[key]) for row in rows]
    return statistics.stdev(values) if len(values) > 1 else 0.0
