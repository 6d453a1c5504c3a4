"""How far methods are from AllReduce as trainings become longer: 25 to 1,000 rounds.

    python -m recipes run rounds                           its trials, then what won in them

Cost: 119 trials of 6 to 70 seconds and 141 runs of 6 seconds (25 rounds) to 4 minutes (1,000) on 2
cores, four hours. 18 further runs of AllReduce, of 50 to 2,000 rounds, train for
48,600 steps with each of three seeds: an hour to an hour and a half.
Found (results/tables/rounds.md): all come nearer to AllReduce's loss with more rounds; in steps to
equal loss none is shown to from 300 to 1,000. DiLoCo wants a quarter of the others' rate.
`co2_keep` in fragments, each three steps late, is nearer than Local SGD, which waits; in 12 it is
not shown to differ from AllReduce after 300 rounds. Streaming DiLoCo is not shown to differ from
Local SGD, after 100 or 300.

Every method takes the best of four learning rates for each number of rounds, found on a seed and
on validation data that the table does not show; DiLoCo, whose best was the lowest, of five. For
1,000 rounds it takes that of 300. Outer settings are those of conf; `co2_keep` sends the model
whole, without momentum. Methods in fragments have those of `FRAGMENTS`, Streaming DiLoCo the better
of two. Variants have the rate of their method. On one replica an outer step averages nothing: what
it changes there is no distribution (SNOO, Kallusky et al., arXiv 2510.15830).

The paper trains for thousands of rounds: its 14,000 steps of ResNet-50 (90 epochs, batches of 8192)
are 1,200 rounds of 12, and 600,000 steps of GPT-2 (nanoGPT's recipe; the paper does not say) are
50,000. What is measured here therefore has to be extrapolated before it is compared: in two ways,
because nobody knows which holds.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from co2.record import drawing
from co2.record.table import NOTHING, Table
from recipes.recipe import Column, Row, Rows
from recipes.tables import equal_steps, figures
from recipes.tables.entries import by_seed, percent_above
from recipes.tables.equal_steps import Curves, Ratio
from recipes.tables.log_mean import LogMean
from recipes.tables.methods import KEPT_WHOLE, PAPERS_GAP, STEADY_GAP
from recipes.tuning.tuning import TunedRecipe, at_rates, trial_column

TAU = 12
WARM_UP = 0.04
"""Share of the steps."""
TUNED_ROUNDS = {25: 25, 100: 100, 300: 300, 1000: 300}
"""By number of rounds: that of the trials whose learning rate it takes."""
ROUNDS = tuple(TUNED_ROUNDS)
CURVE = (25, 50, 100, 200, 300, 400, 600, 800, 1000, 2000)
"""Of AllReduce, whose losses are interpolated between these."""
RATES = ("2e-3", "4e-3", "8e-3", "1.6e-2")
LOWER = {"DiLoCo": ("1e-3",)}
"""By method, rates below: its best of the others is the lowest of them."""
GOAL = 1.0
"""Percent above AllReduce's loss that count as matching it."""
AHEAD = (10_000, 50_000)
"""Rounds that nobody has trained here; the paper's trainings lie around them."""
ALLREDUCE = "AllReduce"
BASES = (
    Row(ALLREDUCE, ("method=allreduce",)),
    Row("Local SGD", ("method=local_sgd",)),
    Row("DiLoCo", ("method=diloco",)),
    STEADY_GAP,
    PAPERS_GAP,
    Row("CO2, kept progress", ("method=co2_keep",)),
)


def variant(base: Row, name: str, override: str) -> Row:
    """The row with one setting more."""
    method = base.overrides[0].removeprefix("method=")
    return Row(f"{base.name}, {name}", (*base.overrides, f"{method}.{override}"))


_, LOCAL_SGD, DILOCO, CO2, _, CO2_KEEP = BASES
TWELVE = Row(
    f"{CO2_KEEP.name}, 12 fragments",
    (*CO2_KEEP.overrides, "co2_keep.fragments=12", "co2_keep.delay=3"),
)
"""Three are under way together, so that nobody waits for a single slow step."""
VARIANTS = {
    variant(base, name, override): base
    for name, override, bases in (
        ("τ ∝ 1/γ", "tau_power=1", (LOCAL_SGD, DILOCO)),
        ("a tenth blocking", "blocking_share=0.1", (CO2, CO2_KEEP)),
        ("a quarter blocking", "blocking_share=0.25", (CO2, CO2_KEEP)),
        ("one step late", "delay=1", (TWELVE,)),
    )
    for base in bases
}
"""And the row whose learning rate each takes."""
RIVALS = {
    Row("NoLoCo", ("method=noloco",)): ("2e-3", "4e-3", "8e-3"),
    Row("SPARTA", ("method=sparta",)): ("4e-3", "8e-3", "1.6e-2"),
    Row("MT-DAO, ω = 0.5", ("method=mt_dao", "mt_dao.slow_weight=0.5")): ("2e-3", "4e-3", "8e-3"),
    Row("DeMo", ("method=demo", "optim.name=sgd", "optim.momentum=0")): ("3e-3", "6e-3", "1.2e-2"),
}
"""Trained for 100 rounds alone, each at the best of three rates."""
LIGHT = "co2_keep.momentum_weight=0.2"
STREAMING = Row(
    "Streaming DiLoCo, 4 fragments",
    (
        "method=streaming_diloco",
        "streaming_diloco.fragments=4",
        "streaming_diloco.delay=null",
    ),
)
FRAGMENTS = {
    Row(f"{CO2_KEEP.name}, 4 fragments", (*CO2_KEEP.overrides, "co2_keep.fragments=4")): (
        ("co2_keep.keep_local=0.5", LIGHT),
    ),
    TWELVE: (("co2_keep.keep_local=1", LIGHT),),
    STREAMING: (
        ("streaming_diloco.outer_lr=0.7", "streaming_diloco.outer_momentum=0.9"),
        ("streaming_diloco.outer_lr=1", "streaming_diloco.outer_momentum=0"),
    ),
}
"""And the outer settings that are tried with each rate. Those of kept progress are what an
independent simulation of four replicas found; Streaming DiLoCo's are conf's and those of plain
averaging. Its fragments are layers, of which this model has five."""
WHOLE = ("launch.workers=1", "train.batch_size=16")
ALONE = {
    Row(f"{one.name}, one replica", (*one.overrides, *WHOLE)): one for one in (DILOCO, CO2, TWELVE)
}
"""The outer step alone, with the batch of both replicas: what of a method is not distribution."""
ROWS = (*BASES, *VARIANTS, *ALONE, *RIVALS, *FRAGMENTS)
OTHERS = ROWS[1:]
DRAWN = BASES[1:]
"""Those with a line in the figures; variants would hide them."""
BESIDE = 1.04
"""In the figure of steps, from one method's place to the next one's, as a factor."""
Gaps = dict[int, list[float]]
"""By number of rounds: percent above AllReduce's loss, for every seed."""


def name(rounds: int) -> str:
    """The name of the column with so many rounds."""
    return f"{rounds:,} rounds"


def words(rounds: int) -> tuple[str, ...]:
    """The overrides of a training of so many rounds."""
    steps = rounds * TAU
    return (
        "task=gpt2",
        f"train.steps={steps}",
        f"train.eval_every={steps}",
        f"optim.warmup_steps={round(WARM_UP * steps)}",
        "checkpoint.every=0",
        *(f"{method}.tau={TAU}" for method in ("local_sgd", "diloco", "co2", "co2_keep")),
        *KEPT_WHOLE,
    )


def tuned_rounds(rounds: int) -> int:
    """The number of rounds whose trials decide the learning rate of a training of so many: itself,
    or the nearest, in factors."""
    nearest = min(TUNED_ROUNDS.values(), key=lambda tuned: abs(math.log(rounds / tuned)))
    return TUNED_ROUNDS.get(rounds, nearest)


def column(rounds: int) -> Column:
    """Validation loss after so many rounds."""
    left_out = [
        *(RIVALS | ALONE if rounds != 100 else ()),
        *(VARIANTS | FRAGMENTS if rounds not in (100, 300) else ()),
    ]
    if rounds not in ROUNDS:
        left_out = [row for row in ROWS if row.name != ALLREDUCE]
    return Column(
        name(rounds),
        words(rounds),
        "final.loss",
        lower=True,
        digits=4,
        curve=False,
        without=tuple(row.name for row in left_out),
        part="" if rounds in ROUNDS else "further points of AllReduce's curve",
    )


def rates_of(base: Row) -> tuple[str, ...]:
    """The learning rates that are tried of a row."""
    return (*LOWER.get(base.name, ()), *RATES)


def trials_of(rounds: int) -> Column:
    """Validation loss of the trials of this number of rounds."""
    rivals = [trial for row, rates in RIVALS.items() for trial in at_rates(row, rates)]
    parts = [trial for row in FRAGMENTS for trial in trials_in_fragments(row)]
    left_out = [*(rivals if rounds != 100 else ()), *(parts if rounds not in (100, 300) else ())]
    return trial_column(name(rounds), words(rounds), tuple(trial.name for trial in left_out))


def trials_with(base: Row) -> tuple[Row, ...]:
    """The trials whose best has the settings of this row."""
    return tuple(trials_in_fragments(base)) if base in FRAGMENTS else at_rates(base, rates_of(base))


def trials_in_fragments(row: Row) -> Iterator[Row]:
    """The trials of a row of `FRAGMENTS`: every rate with each of its outer settings."""
    for settings in FRAGMENTS[row]:
        named = ", ".join(setting.partition(".")[2] for setting in settings)
        yield from at_rates(Row(f"{row.name}, {named}", (*row.overrides, *settings)), RATES)


def gaps(ours: Rows) -> dict[str, Gaps]:
    """By method: the gaps of the numbers of rounds that have run."""
    losses = by_seed(ours)
    found: dict[str, Gaps] = {}
    for row in OTHERS:
        for rounds in ROUNDS:
            own, base = (losses.get((who, name(rounds)), {}) for who in (row.name, ALLREDUCE))
            above = percent_above(own, base)
            if above:
                found.setdefault(row.name, {})[rounds] = list(above.values())
    return found


def curves(ours: Rows) -> Mapping[str, Curves]:
    """The final losses of every method, by seed and number of rounds."""
    losses = by_seed(ours)
    found: dict[str, dict[int, dict[int, float]]] = {row.name: {} for row in ROWS}
    for method, seeds in found.items():
        for rounds in CURVE:
            for seed, loss in losses.get((method, name(rounds)), {}).items():
                seeds.setdefault(seed, {})[rounds] = loss
    return found


def ratios(ours: Rows) -> dict[str, dict[int, Ratio]]:
    """By method and number of rounds: how many times AllReduce's steps it needs."""
    of = curves(ours)
    found: dict[str, dict[int, Ratio]] = {}
    for row in OTHERS:
        for rounds in ROUNDS:
            ratio = equal_steps.ratio(of[row.name], of[ALLREDUCE], rounds)
            if ratio is not None:
                found.setdefault(row.name, {})[rounds] = ratio
    return found


def tables(ours: Rows, _: Rows) -> Iterator[Table]:
    """The gaps in steps, and where they would lead."""
    measured = ratios(ours)
    if not measured:
        return
    yield Table(
        name="rounds_steps",
        title="Steps in units of AllReduce's",
        text="x = S / S_AR: after S steps the method has a loss that AllReduce has after S_AR. "
        f"{points_text(curves(ours)[ALLREDUCE])} each a training with a schedule of its own; "
        "between them it is a monotone spline of the loss over the logarithm of the steps. † marks "
        "an extrapolation: the loss lies beyond AllReduce's, so the line of the nearest two points "
        "goes on. Seed by seed; geometric mean with a 95 % interval, which adds the spread of the "
        "seeds and the error of the spline, estimated from points that are left out: "
        f"{fit_text(measured)} of x, also where a single seed has no interval.",
        head=("method", *map(name, ROUNDS)),
        rows=[
            (method, *(ratio_words(own.get(rounds)) for rounds in ROUNDS))
            for method, own in measured.items()
        ],
    )
    yield ahead(curves(ours))


def points_text(allreduce: Curves) -> str:
    """The points on which AllReduce's curve stands, as the beginning of a sentence."""
    points = sorted({rounds for curve in allreduce.values() for rounds in curve})
    fewer = any(len(curve) < len(points) for curve in allreduce.values())
    return (
        f"AllReduce's curve has {len(points)} points{', fewer of some seeds' if fewer else ''} "
        f"({', '.join(f'{rounds:,}' for rounds in points)} rounds),"
    )


def fit_text(measured: Mapping[str, Mapping[int, Ratio]]) -> str:
    """The smallest and the largest standard error of the fit among these."""
    errors = [ratio.fit_error for own in measured.values() for ratio in own.values()]
    ends = dict.fromkeys(f"{100 * error:.0f}" for error in (min(errors), max(errors)))
    return f"{' to '.join(ends)} %"


def ratio_words(ratio: Ratio | None) -> str:
    """x as the table shows it."""
    if ratio is None:
        return NOTHING
    return ratio.mean.text("z.2f", mark="†" if ratio.extrapolated else "")


def ahead(of: Mapping[str, Curves]) -> Table:
    """Each method's gap after more rounds than were measured, extrapolated in two ways."""
    base = of[ALLREDUCE]
    rows = []
    longest = [
        row.name for row in OTHERS if any(ROUNDS[-1] in curve for curve in of[row.name].values())
    ]
    for method in longest:
        found = equal_steps.gap_exponents(of[method], base).values()
        same_b = [equal_steps.at_steady_exponent(of[method], base, rounds) for rounds in AHEAD]
        same_x = equal_steps.at_steady_ratio(of[method], base)
        b = f"{statistics.fmean(b for b, *_ in found):.2f}" if found else NOTHING
        shown = [NOTHING if gap is None else gap.text("z.2f") for gap in (same_x, *same_b)]
        rows.append((method, shown[0], b, *shown[1:], agreement(same_x, same_b)))
    means = {
        rounds: statistics.fmean(losses)
        for rounds in CURVE
        if (losses := [curve[rounds] for curve in base.values() if rounds in curve])
    }
    falls = [equal_steps.exponent(dict(pair)) for pair in pairwise(means.items())]
    far = " or ".join(f"{rounds:,}" for rounds in AHEAD)
    return Table(
        name="rounds_ahead",
        title=f"Percent above AllReduce after {far} rounds: two extrapolations",
        text="Nobody has measured these. (a) x stays what it was in the longest training, and "
        "AllReduce's loss falls on by the power law of its last two points: then the gap is x^b − "
        "1 after any number of rounds, because a power law turns a constant factor in steps into "
        "a constant percentage. Between its points AllReduce's exponent b is "
        f"{', '.join(f'{b:.2f}' for b in falls)}; where it becomes smaller still, (a) is too "
        "large. (b) The gap itself falls by the power law of its own last two points. Means over "
        "the seeds with 95 % t intervals of the logarithms, which know nothing of whether a law "
        "goes on. They agree where their intervals overlap.",
        head=(
            "method",
            "(a) x stays, %",
            "(b) exponent",
            *(f"(b) {rounds:,} rounds, %" for rounds in AHEAD),
            "agree",
        ),
        rows=rows,
    )


def agreement(same_x: LogMean | None, same_b: list[LogMean | None]) -> str:
    """After which numbers of rounds both extrapolations have intervals that overlap."""
    if same_x is None or same_x.half_width is None or None in same_b:
        return NOTHING
    pairs = zip(AHEAD, same_b, strict=True)
    agree = [f"{rounds:,}" for rounds, gap in pairs if gap is not None and same_x.overlaps(gap)]
    return " and ".join(agree) or "no"


def draw(ours: Rows, stem: Path) -> Iterator[Path]:
    """Draw the gap over rounds, and the steps in units of AllReduce's, a line for each method."""
    found, measured = gaps(ours), ratios(ours)
    if found:
        path = figures.beside(stem, "gaps")
        with over_rounds(path, "GPT-2: loss above AllReduce's") as axis:
            figures.lines(axis, {row: found.get(row.name, {}) for row in DRAWN})
            axis.axhline(GOAL, label=f"{GOAL:g} %", **drawing.LIMIT)
            axis.set_ylabel("% above AllReduce")
        yield path
    if measured:
        path = figures.beside(stem, "steps")
        looks = figures.styles(DRAWN)
        with over_rounds(path, "GPT-2: steps to AllReduce's loss") as axis:
            for number, row in enumerate(DRAWN):
                own = measured.get(row.name, {})
                aside = BESIDE ** (number - len(DRAWN) // 2)  # or bars would hide each other
                middles, bars = figures.bars(ratio.mean for ratio in own.values())
                means = dict(zip((aside * rounds for rounds in own), middles, strict=True))
                hollow = [aside * rounds for rounds, ratio in own.items() if ratio.extrapolated]
                drawing.points(axis, means, bars, hollow, **looks[row.name])
            style = {"color": drawing.GREY, "marker": "o", "fillstyle": "none", "linestyle": "none"}
            axis.plot([], [], label="extrapolated", **style)
            figures.reference(axis, BASES[0], 1)
            axis.set_ylabel("steps per step of AllReduce")
        yield path


@contextmanager
def over_rounds(path: Path, title: str) -> Iterator[Any]:
    """A panel over the numbers of rounds, on a logarithmic axis. Any: axes of matplotlib."""
    with figures.panel(path, title) as axis:
        yield axis
        axis.set_xscale("log")
        axis.set_xticks(ROUNDS, [f"{rounds:,}" for rounds in ROUNDS])
        axis.set_xticks([], minor=True)
        axis.set_xlabel(f"rounds of {TAU} steps")


RECIPE = TunedRecipe(
    name="rounds",
    title="Gap to AllReduce against rounds",
    text=f"GPT-2, two workers, τ = {TAU}, validation loss as trained; every method at the best of "
    "four learning rates, DiLoCo of five, NoLoCo, SPARTA, MT-DAO and DeMo of three, for each "
    "number of rounds (rounds_trials), for 200 and 400 or more rounds at that of 300, with default "
    "outer settings, kept progress whole and without momentum; in fragments with those of a "
    "simulation, Streaming DiLoCo at the best of two outer settings with each rate. "
    f"The warm-up takes {WARM_UP:.0%} of the steps.",
    rows=ROWS,
    columns=tuple(column(rounds) for rounds in dict.fromkeys((*ROUNDS, *CURVE))),
    scales=("smoke",),
    draw=draw,
    beside=tables,
    grids={
        row.name: trials_with(base)
        for row, base in ({row: row for row in (*BASES, *FRAGMENTS)} | VARIANTS | ALONE).items()
    }
    | {row.name: at_rates(row, rates) for row, rates in RIVALS.items()},
    tuned_in={name(rounds): trials_of(tuned_rounds(rounds)) for rounds in CURVE},
)
