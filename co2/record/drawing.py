"""How figures look: a colour and a marker for each method, in every figure, and grey lettering on a
transparent ground, which can be read on a light and on a dark page.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
CURVES = 6
"""A panel has at most so many curves or dots whose colours must be told apart; references are grey.
"""
GREY = "#7c7c7c"
LIMIT = {"color": GREY, "linestyle": "--"}
"""The style of a line that others are compared with."""
COMPUTE, SEND, WAIT = "#3b76b4", "#2d8a4e", "#d03030"
"""The colours of a worker that computes, of a collective, and of a worker that stands still."""
LOOKS: Mapping[str, tuple[str, Any]] = {
    "allreduce": ("#e0402b", "s"),
    "local_sgd": ("#b8860b", "^"),
    "slowmo": ("#8a6a3a", "D"),
    "diloco": ("#8f5fd7", "v"),
    "noloco": ("#297662", "H"),
    "overlap_local_sgd": ("#d6449b", "P"),
    "cocod_sgd": ("#1597a5", "X"),
    "streaming_diloco": ("#777714", ">"),
    "eager_diloco": ("#987aa1", "d"),
    "sparseloco": ("#06a281", "p"),
    "co2": ("#2a7de1", "o"),
    "co2_keep": ("#1f9d55", "*"),
    "co2_released": ("#2d95dc", "h"),
    "acco": ("#b87452", "<"),
    "sparta": ("#819609", "8"),
    "desloc": ("#cb5980", "x"),
    "mt_dao": ("#2d7c06", (4, 1, 0)),
    "demo": ("#bc72cb", (3, 1, 0)),
    "onebit_adam": ("#50789e", (6, 1, 0)),
    "zero_one_adam": ("#9a545b", (3, 1, 180)),
}
"""Method → colour and marker: a letter, or a star's number of points, 1, and its angle. Each colour
has a contrast above 3 to a white and to a black page. Methods of a kind, which share panels, have
colours far apart."""
_DASHES, _HALVES = ("-", "--", ":", "-."), ("full", "bottom", "left", "top")
LETTERS = 12
"""Points. A phone shows a figure 324 wide about as large as the page's words."""
_LEGEND = 11
"""Letters of a legend that fit into an inch."""


def look(method: str, number: int = 0) -> dict[str, Any]:
    """The line style of a method; `number`: how many of its variants the figure has already.

    Any: keyword arguments of matplotlib's `plot`.
    """
    colour, marker = LOOKS.get(method, (GREY, "."))
    star = marker == "*" or isinstance(marker, tuple)
    style = {"color": colour, "marker": marker, "markersize": 7 if star else 5}
    if number:
        half = (number + number // 4) % 4
        style |= {"linestyle": _DASHES[number % 4], "fillstyle": _HALVES[half]}
        style |= {"markerfacecoloralt": "none"}
    return style


def split(items: Sequence[T], room: int = CURVES) -> list[Sequence[T]]:
    """The items of each panel: as few panels as hold them all, and about as many items in each."""
    count = -(-len(items) // room) or 1
    each = -(-len(items) // count)
    return [items[at * each : (at + 1) * each] for at in range(count)]


@contextmanager
def panels(
    path: Path,
    titles: Sequence[str],
    size: tuple[float, float] = (4.5, 3.4),
    beside: bool = False,
    alike: bool = True,
) -> Iterator[Any]:
    """An axis for each title, below each other or `beside`, written to the file at the end. Below
    each is a legend, where its lines have labels; beside each other they have one.

    Args:
        size: of a panel without the legend, inches.
        alike: whether all have the same scales.

    Any: matplotlib is imported only here, and its axes carry no useful types.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    count = len(titles)
    with rc_context({"font.size": LETTERS}):
        figure = Figure(layout="constrained")
        parts = [figure] if beside else figure.subfigures(count, 1, squeeze=False)[:, 0].tolist()
        axes: list[Any] = []
        for number, title in enumerate(titles):
            place = (1, count, number + 1) if beside else (1, 1, 1)
            first = axes[0] if axes and alike else None
            axis = parts[0 if beside else number].add_subplot(*place, sharex=first, sharey=first)
            axis.set_title(title, fontsize="medium")
            axis.grid(alpha=0.3)
            axes.append(axis)
        yield axes
        if beside:
            for axis in axes:
                axis.label_outer()
        wide, high = size[0] * (count if beside else 1), size[1]
        figure.set_size_inches(wide, sum(high + _legend(part, wide) for part in parts))
    save(figure, path)


def _legend(part: Any, wide: float) -> float:
    """A legend below this part of a figure, in as many columns as fit: its height in inches."""
    found: dict[str, Any] = {}
    for axis in part.axes:
        handles, labels = axis.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    if not found:
        return 0.0
    columns = min(len(found), int(_LEGEND * wide) // (max(map(len, found)) + 4)) or 1
    part.legend(
        found.values(),
        found,
        loc="outside lower center",
        ncols=columns,
        fontsize=0.8 * LETTERS,
        frameon=False,
        labelspacing=0.2,
        handlelength=1.7,
        columnspacing=1,
    )
    return 0.18 * -(-len(found) // columns)


def points(
    axis: Any,
    means: Mapping[Any, float],
    bars: Any = None,
    hollow: Sequence[Any] = (),
    **style: Any,
) -> None:
    """A line through the means with error bars. The markers at `hollow`, which are extrapolated,
    have no filling. Any: axes, places and keyword arguments of matplotlib."""
    x, y = list(means), list(means.values())
    full = [at for at, place in enumerate(x) if place not in hollow]
    axis.errorbar(x, y, bars, capsize=3, elinewidth=1, markevery=full, **style)
    empty = {"linestyle": "none", "fillstyle": "none", "label": None}
    axis.plot(x, y, markevery=[at for at in range(len(x)) if at not in full], **style | empty)


def save(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib. The same figure makes the same file: no date, no random names.

    Its text stays text, so that a page can colour it.
    """
    from matplotlib import rc_context
    from matplotlib.text import Text

    for axis in figure.axes:
        axis.tick_params(colors=GREY, which="both")
        for spine in axis.spines.values():
            spine.set_color(GREY)
    for text in figure.findobj(Text):
        text.set_color(GREY)
    path.parent.mkdir(parents=True, exist_ok=True)
    # One name for the font, because a list of them would stand beside every word of the file.
    font = ["DejaVu Sans"]
    with rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none", "font.sans-serif": font}):
        dated = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
        figure.savefig(path, transparent=True, **dated)
