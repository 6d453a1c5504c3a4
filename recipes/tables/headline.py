"""What a reader sees first: cost and benefit of every method together, as a figure and a table.

Net time is steps to equal loss over the share of the throughput that is kept: the time to
AllReduce's loss in units of AllReduce's own without communication.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from typing import Any

from scipy.stats import t

from co2.record import drawing
from co2.record.table import NOT_RUN, NOTHING, Table
from recipes.recipe import Rows
from recipes.registry import RECIPES
from recipes.studies import fragments, rounds
from recipes.studies.fashion import DEFAULTS
from recipes.tables import figures, shares
from recipes.tables.answer import DATA, fragments_of
from recipes.tables.entries import Entry, entries
from recipes.tables.equal_steps import Ratio
from recipes.tables.log_mean import LogMean
from recipes.tables.methods import METHODS, PAPERS_GAP, STEADY_GAP

LINKS = ("40 Mbit/s", "100 Mbit/s")
SLOWEST = LINKS[0]
BUDGET = 300
"""Rounds of the figure and of net time: as many as table2 trains."""
BUDGETS = (100, BUDGET, 1000)
WAITS = f"waits, %, {SLOWEST}, fp32"
STEPS, NET_TIME, POINTS_MORE = "steps, {:,} rounds", "net time, {}", "{}, points"
RACE = "time to the loss, 20 Mbit/s, best wire and τ"
RACE_COLUMN = ("time_to_loss", "ratio to AllReduce's seconds")
RACE_WAITS = ("time_to_loss", "exposed, % of training")
FIRST_COLUMNS = (
    "method",
    WAITS,
    *map(STEPS.format, BUDGETS[1:]),
    *map(NET_TIME.format, LINKS),
    RACE,
    POINTS_MORE.format("ViT"),
    POINTS_MORE.format("Point-MAE"),
)
ALLREDUCE = METHODS[0].name
ROWS = (*METHODS, *(row for row in rounds.BASES if row not in METHODS), *rounds.FRAGMENTS)
POINTS = {
    "Fashion-MNIST": ("fashion", "top-1, %, 2 replicas"),
    "ViT": ("table1", "ViT"),
    "mIoU": ("table1", "ADE20K"),
    "Point-MAE": ("table1", "ShapeNet"),
}
"""Recipe and column of scores, of which points are shown."""
FIRST_ROWS = (
    "AllReduce",
    "Local SGD",
    "Overlap-Local-SGD",
    STEADY_GAP.name,
    "CO2, kept progress",
    rounds.TWELVE.name,
    rounds.STREAMING.name,
)
DRAWN = {*FIRST_ROWS, PAPERS_GAP.name} - {rounds.CO2_KEEP.name}
"""In the figure, which has room for six: without whole kept progress, which is not its default."""
NET_TIMES = (1, 2, 4, 8)
"""Of the diagonals."""


@dataclass(frozen=True)
class Dot:
    """A method on one link."""

    share: LogMean
    """Of the throughput without communication."""
    steps: LogMean
    """To equal loss, in units of AllReduce's."""

    @property
    def net_time(self) -> LogMean:
        halves = [one.half_width for one in (self.share, self.steps) if one.half_width is not None]
        width = math.hypot(*halves) if halves else None
        return LogMean(self.steps.mean - self.share.mean, width)


def dots(ours: Rows) -> dict[tuple[str, str], Dot]:
    """By method and link: those of which both have run."""
    kept = _shares(ours)
    steps = rounds.ratios(_of(ours, "rounds"))
    found = {}
    for (row, link), share in kept.items():
        ratio = LogMean(0.0) if row == ALLREDUCE else _at(steps, row, BUDGET)
        if ratio is not None:
            half = None if share.half_width is None else share.half_width / share.mean
            found[row, link] = Dot(LogMean(math.log(share.mean / 100), half), ratio)
    return found


def _at(steps: Mapping[str, Mapping[int, Ratio]], row: str, budget: int) -> LogMean | None:
    ratio = steps.get(row, {}).get(budget)
    return None if ratio is None else ratio.mean


def _of(ours: Rows, recipe: str) -> Rows:
    return [line for line in ours if line["recipe"] == recipe]


def _shares(ours: Rows) -> dict[tuple[str, str], shares.Share]:
    """Of `fragments`, whose rows have all run on one processor."""
    found = shares.shares(fragments.RECIPE, _of(ours, "fragments"), "2 workers")
    for link in LINKS:  # the gap changes nothing that is sent
        if (STEADY_GAP.name, link) in found:
            found[PAPERS_GAP.name, link] = found[STEADY_GAP.name, link]
    return found


def draw(ours: Rows, path: Path) -> Iterator[Path]:
    """Draw a panel for each link, if there is a dot: six methods, which readers can tell apart."""
    found = {place: dot for place, dot in dots(ours).items() if place[0] in DRAWN}
    if not found:
        return
    titles = [f"links of {link}" for link in LINKS]
    with drawing.panels(path, titles, (3.1, 3.6), beside=True) as axes:
        for axis, link in zip(axes, LINKS, strict=True):
            _panel(axis, link, found)
        axes[0].set_ylabel("steps per step of AllReduce,\nto the same loss")
    yield path


def _panel(axis: Any, link: str, found: Mapping[tuple[str, str], Dot]) -> None:
    """A dot for each method, over diagonals of equal net time. Any: axes of matplotlib."""
    axis.set_xscale("log")
    axis.set_yscale("log")
    low, high = 0.8, 1.3 * max(math.exp(dot.steps.mean) for dot in found.values())
    left = 70 * math.exp(min(dot.share.mean for dot in found.values()))
    axis.set_xlim(left, 150)
    axis.set_ylim(low, high)
    for time in NET_TIMES:
        label = "equal net time" if time == NET_TIMES[0] else None
        ends = [time * left / 100, time * 1.5]
        axis.plot([left, 150], ends, zorder=0, lw=0.8, label=label, **drawing.LIMIT)
        if 1.1 * left < 100 * low / time:
            place = (100 * low / time, low)
            axis.annotate(f"×{time:g}", place, (-2, 6), textcoords="offset points", ha="right")
    for row, style in figures.styles(ROWS).items():
        dot = found.get((row, link))
        if dot is not None:
            style |= {"markersize": 1.8 * style["markersize"], "linestyle": "none"}
            x, y = (
                figures.bars([mean], factor) for mean, factor in ((dot.share, 100), (dot.steps, 1))
            )
            axis.errorbar(x[0], y[0], y[1], x[1], elinewidth=1, capsize=3, **style)
    axis.annotate("better ↘", (0.03, 0.97), xycoords="axes fraction", va="top")
    axis.set_xticks((10, 20, 50, 100), ("10", "20", "50", "100"))
    axis.set_yticks((1, 1.5, 2), ("1", "1.5", "2"))
    axis.minorticks_off()
    axis.set_xlabel("throughput kept, % of that\nwithout communication")


def table(ours: Rows, scale: str) -> Table:
    """A line for each method; without lines where nothing has run."""
    rows = [row for row in ROWS if any(line["row"] == row.name for line in ours)]
    found, steps = dots(ours), rounds.ratios(_of(ours, "rounds"))
    waits = _entries(ours, "fragments", scale)
    settings = {line["row"]: line["command"] for line in _of(ours, "time_to_loss")}
    race, raced, *scores = _renamed(ours, (RACE_COLUMN, RACE_WAITS, *POINTS.values()), scale)
    lines = []
    for row in rows:
        first = row.name == ALLREDUCE
        fp32 = waits.get((row.name, f"2 workers, waiting for communication %, {SLOWEST}"))
        line = [row.name, _mean(fp32), _best(raced.get(row.name), settings)]
        for budget in BUDGETS:
            mean = steps.get(row.name, {}).get(budget)
            line.append("1" if first and steps else rounds.ratio_words(mean) if mean else NOT_RUN)
        for link in LINKS:
            dot = found.get((row.name, link))
            line.append(dot.net_time.text(".2f") if dot else NOT_RUN)
        line.append(_interval(race.get(row.name)))
        line += [_points(of.get(row.name), first) for of in scores]
        lines.append(line)
    if not any(cell not in (NOT_RUN, NOTHING) for line in lines for cell in line[1:]):
        lines = []
    heads = (
        "method",
        WAITS,
        "waits, %, best wire and τ",
        *map(STEPS.format, BUDGETS),
        *map(NET_TIME.format, LINKS),
        RACE,
        *map(POINTS_MORE.format, POINTS),
    )
    text = (
        "GPT-2, two workers. Waits: share of the time in which a worker stands still for links "
        f"of {SLOWEST} (1.3 M parameters), or of 20 Mbit/s with the wire and τ that reached "
        "AllReduce's loss soonest (0.19 M). Steps: for AllReduce's loss, in units of AllReduce's "
        f"steps (0.19 M). Net time: steps after {BUDGET} rounds over the share of the throughput "
        "that is kept (fp32), a multiple of AllReduce's time if nothing were sent. Waits at "
        f"{SLOWEST} and speeds are of one processor (fragments), the other waits of another "
        "(time_to_loss). Time to the loss: measured, with the type on "
        "the wire, τ and schedule that are best for each method, in units of AllReduce's on "
        "unlimited links, where it waits as well (time_to_loss). Points: AllReduce's score in "
        "percent, and what others have more; a star as in table1. In steps and "
        "net times AllReduce, Local SGD, CoCoD-SGD and whole kept progress have no outer momentum, "
        "the others have one; kept progress in fragments has the κ and w of a simulation there, "
        "and 12 are three steps late; the paper's gap and DiLoCo have conf's outer settings there, "
        "which did not win their searches. The paper's gap is our reading of it, without a clip. "
        "The time to the loss and scores have what won or is the "
        "default, one step late. Brackets: 95 % intervals. Without a star a method is not shown to "
        "differ, nor shown to be equal."
    )
    return Table(heads, lines, title="Cost and benefit", text=text)


def at_first(ours: Rows, scale: str) -> Table:
    """The methods and columns of `table` that a first look is for."""
    whole = table(ours, scale)
    at = [list(whole.head).index(head) for head in FIRST_COLUMNS]
    rows = {str(row[0]): [row[place] for place in at] for row in whole.rows}
    text = (
        "GPT-2, two workers: 0.19 M parameters for steps to AllReduce's loss, 1.3 M for waits "
        f"and speed. Net time combines both: steps at {BUDGET} rounds, divided by the kept speed. "
        "1 is, of steps, AllReduce's; of net time, AllReduce's if nothing were sent; of time to "
        "the loss, AllReduce's on unlimited links. In steps and net times AllReduce, "
        "Local SGD and whole kept progress have no outer momentum, the others have one; 12 "
        "fragments have settings of a simulation there, in the time to the loss and scores what "
        "won. "
        f"ViT on {DATA['ViT'].partition(', ')[2]}, Point-MAE on generated solids: AllReduce's "
        "accuracy in percent, and points above it. [Brackets, stars]"
        "(docs/results.md#cost-and-benefit)."
    )
    lines = [rows[name] for name in FIRST_ROWS if name in rows]
    return Table(FIRST_COLUMNS, lines, title="Cost and benefit", text=text)


def _entries(ours: Rows, recipe: str, scale: str) -> Mapping[tuple[str, str], Entry]:
    """Those of a recipe, by names of row and column; none where there is no such recipe."""
    if recipe not in RECIPES:
        return {}
    own = entries(RECIPES[recipe], _of(ours, recipe), scale)
    return {(entry.row.name, entry.column.name): entry for entry in own if entry.values}


def _renamed(
    ours: Rows, columns: Sequence[tuple[str, str]], scale: str
) -> Iterator[dict[str, Entry]]:
    """For each recipe and column its entries, by row. Where kept progress is sent in fragments, by
    default or because its search chose so, they are the row of these."""
    recipes = dict.fromkeys(recipe for recipe, _ in columns)
    found = {recipe: _entries(ours, recipe, scale) for recipe in recipes}
    for recipe, column in columns:
        names = {DEFAULTS.name: rounds.TWELVE.name} | {
            line["row"]: f"{line['row']}, {number} fragments"
            for line in _of(ours, recipe)
            if line["column"] == column
            and (number := fragments_of(line["command"])) not in (None, "1")
        }
        yield {
            names.get(row, row): entry
            for (row, name), entry in found[recipe].items()
            if name == column
        }


def _mean(entry: Entry | None) -> str:
    return NOT_RUN if entry is None else f"{entry.mean:.1f}"


def _interval(entry: Entry | None) -> str:
    """Mean with the 95 % t interval over the seeds."""
    if entry is None:
        return NOT_RUN
    values = list(entry.values.values())
    if len(values) < 2:
        return f"{entry.mean:.2f}"
    half = t.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return f"{entry.mean:.2f} [{entry.mean - half:.2f}, {entry.mean + half:.2f}]"


def _best(entry: Entry | None, commands: Mapping[str, str]) -> str:
    """The share, with what won; of the commands by row."""
    if entry is None:
        return NOT_RUN
    given = commands[entry.row.name].split()
    words = dict(word.split("=", 1) for word in given if "=" in word)
    tau = [value for key, value in words.items() if key.endswith(".tau")]
    chosen = ", ".join([words.get("comm.dtype", "fp32"), *(f"τ = {value}" for value in tau)])
    return f"{entry.mean:.1f} ({chosen})"


def _points(entry: Entry | None, first: bool) -> str:
    if entry is None:
        return NOT_RUN
    if first or entry.to_first is None:
        return f"{entry.mean:.1f}"
    return f"{entry.to_first.mean:+z.1f}{' *' if entry.to_first.significant else ''}"
