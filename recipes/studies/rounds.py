"""How far methods are from AllReduce as trainings become longer: 25 to 1,000 rounds.

    python -m recipes run rounds                           its trials, then what won in them

Cost: 63 trials of 6 to 70 seconds and 60 runs of 6 seconds (25 rounds) to 4 minutes (1,000) on 2
cores, two hours.
Found (results/tables/rounds.md): every gap falls as trainings become longer, CO2's slowest. DiLoCo
wants a quarter of the others' rate.

Every method takes the best of four learning rates for each number of rounds, found on a seed and
on validation data that the table does not show; DiLoCo, whose best was the lowest, of five. For
1,000 rounds it takes that of 300. Outer settings are those of conf.

The paper trains for thousands of rounds: its 14,000 steps of ResNet-50 (90 epochs, batches of 8192)
are 1,200 rounds of 12, and 600,000 steps of GPT-2 (nanoGPT's recipe; the paper does not say) are
50,000. What is measured here therefore has to be extrapolated before it is compared, and the table
marks what is.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from co2.methods import METHODS
from co2.record.table import NOTHING, Table
from recipes.recipe import Column, Row, Rows
from recipes.tables import figures
from recipes.tables.entries import by_seed, interval_text, percent_above
from recipes.tables.power_law import RESAMPLES, PowerLaw, interval, resampled
from recipes.tuning.tuning import TunedRecipe, at_rates, trial_column

TAU = 12
WARM_UP = 0.04
"""Share of the steps."""
TUNED_ROUNDS = {25: 25, 100: 100, 300: 300, 1000: 300}
"""By number of rounds: that of the trials whose learning rate it takes."""
ROUNDS = tuple(TUNED_ROUNDS)
RATES = ("2e-3", "4e-3", "8e-3", "1.6e-2")
LOWER = {"DiLoCo": ("1e-3",)}
"""By method, rates below: its best of the others is the lowest of them."""
GOAL = 1.0
"""Percent above AllReduce's loss that count as matching it."""
ALLREDUCE = "AllReduce"
BASES = (
    Row(ALLREDUCE, ("method=allreduce",)),
    Row("Local SGD", ("method=local_sgd",)),
    Row("DiLoCo", ("method=diloco",)),
    Row("CO2", ("method=co2",)),
    Row("CO2, kept progress", ("method=co2_keep",)),
)


def variant(base: Row, name: str, override: str) -> Row:
    """The row with one setting more."""
    method = base.overrides[0].removeprefix("method=")
    return Row(f"{base.name}, {name}", (*base.overrides, f"{method}.{override}"))


_, LOCAL_SGD, DILOCO, CO2, CO2_KEEP = BASES
VARIANTS = {
    variant(base, name, override): base
    for name, override, bases in (
        ("τ ∝ 1/γ", "tau_power=1", (LOCAL_SGD, DILOCO)),
        ("a tenth blocking", "blocking_share=0.1", (CO2, CO2_KEEP)),
        ("a quarter blocking", "blocking_share=0.25", (CO2, CO2_KEEP)),
    )
    for base in bases
}
"""And the row whose learning rate each takes."""
WHOLE = ("launch.workers=1", "train.batch_size=16")
ALONE = {Row(f"{one.name}, one replica", (*one.overrides, *WHOLE)): one for one in (DILOCO, CO2)}
"""The outer step alone, with the batch of both replicas: what of a method is not distribution."""
RIVALS = {
    Row("NoLoCo", ("method=noloco",)): ("2e-3", "4e-3", "8e-3"),
    Row("SPARTA", ("method=sparta",)): ("4e-3", "8e-3", "1.6e-2"),
    Row("MT-DAO, ω = 0.5", ("method=mt_dao", "mt_dao.slow_weight=0.5")): ("2e-3", "4e-3", "8e-3"),
    Row("DeMo", ("method=demo", *METHODS["demo"].needs)): ("3e-3", "6e-3", "1.2e-2"),
}
"""Trained for 100 rounds alone, each at the best of three rates."""
ROWS = (*BASES, *VARIANTS, *ALONE, *RIVALS)
OTHERS = ROWS[1:]
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
    )


def column(rounds: int) -> Column:
    """Validation loss after so many rounds."""
    left_out = [*(RIVALS if rounds != 100 else ()), *(VARIANTS | ALONE if rounds == 25 else ())]
    return Column(
        name(rounds),
        words(rounds),
        "final.loss",
        lower=True,
        digits=4,
        curve=False,
        without=tuple(row.name for row in left_out),
    )


def trials_of(rounds: int) -> Column:
    """Validation loss of the trials of this number of rounds."""
    rivals = [trial for row, rates in RIVALS.items() for trial in at_rates(row, rates)]
    without = () if rounds == 100 else tuple(trial.name for trial in rivals)
    return trial_column(name(rounds), words(rounds), without)


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


def law(measured: Gaps) -> PowerLaw | None:
    """The power law through the means over the seeds."""
    means = {rounds: statistics.fmean(values) for rounds, values in measured.items()}
    return PowerLaw.through(means)


def tables(ours: Rows, _: Rows) -> Iterator[Table]:
    """The gaps in percent, and the power law through those of every method."""
    found = gaps(ours)
    if not found:
        return
    yield Table(
        name="rounds_gaps",
        title="Percent above AllReduce, by rounds",
        text="Mean over the seeds of the difference to AllReduce's loss of the same seed, with its "
        f"95 % t interval. Goal: {GOAL:g} % or less.",
        head=("method", *map(name, ROUNDS)),
        rows=[
            (method, *(interval_text(measured.get(rounds, ())) for rounds in ROUNDS))
            for method, measured in found.items()
        ],
    )
    yield Table(
        name="rounds_fit",
        title="Power law through the gaps",
        text="gap = a · R^−b, in percent after R rounds, fitted in logarithms through the means "
        f"over the seeds; in brackets, where 95 % of {RESAMPLES:,} laws lie whose seeds were drawn "
        "again. A draw in which a mean is not above 0 has no law and is left out. With three seeds "
        "such intervals are too narrow, and they know nothing of whether the law goes on. "
        "Extrapolated marks a number of rounds that no training here had. The paper's trainings "
        "have thousands of rounds, all of them beyond what is measured here.",
        head=("method", "a, %", "b", "draws with a law", f"rounds to {GOAL:g} %"),
        rows=[(method, *fit_words(measured)) for method, measured in found.items()],
    )


def fit_words(measured: Gaps) -> Sequence[str]:
    """a, b, the share of draws with a law, and the rounds to the goal, as the table shows them."""
    own = law(measured)
    if own is None:
        return (NOTHING,) * 4
    drawn = resampled(measured) if min(map(len, measured.values())) > 1 else []
    ends = interval([one.b for one in drawn]) if drawn else None
    b = f"{own.b:.2f}" + ("" if ends is None else f" [{ends[0]:.2f}, {ends[1]:.2f}]")
    rounds = rounds_word(own.rounds(GOAL))
    if drawn:
        low, high = interval([one.rounds(GOAL) for one in drawn])
        rounds += f" [{rounds_word(low)}, {rounds_word(high)}]"
    if not min(measured) <= own.rounds(GOAL) <= max(measured):
        rounds += ", extrapolated"
    share = f"{len(drawn) / RESAMPLES:.0%}" if drawn else NOTHING
    return (f"{own.a:.3g}", b, share, rounds)


def rounds_word(rounds: float) -> str:
    """Two digits of a number of rounds, which has no more."""
    return "never" if math.isinf(rounds) else f"{float(f'{rounds:.2g}'):,.0f}"


def figure(stem: Path) -> Path:
    """The file of the gap over rounds, which the report opens with."""
    return figures.beside(stem, "gaps")


def draw(ours: Rows, stem: Path) -> Iterator[Path]:
    """Draw the gap over rounds, a line for each method, with its power law dashed."""
    found = gaps(ours)
    if not found:
        return
    path = figure(stem)
    with figures.panel(path, "GPT-2: percent above AllReduce's loss") as axis:
        for number, row in enumerate(OTHERS):
            measured = found.get(row.name, {})
            means = {rounds: statistics.fmean(values) for rounds, values in measured.items()}
            spreads = [
                statistics.stdev(values) if len(values) > 1 else 0.0 for values in measured.values()
            ]
            own = law(measured)
            if means:
                style = figures.style(number, row.name)
                style["linestyle"] = "-" if own is None else "none"
                axis.errorbar(list(means), list(means.values()), spreads, capsize=3, **style)
            if own is not None:
                at = [min(means) * (max(means) / min(means)) ** (n / 40) for n in range(41)]
                axis.plot(at, [own.gap(rounds) for rounds in at], "--", color=f"C{number}")
        axis.axhline(GOAL, label=f"{GOAL:g} %", **figures.LIMIT)
        axis.set_xscale("log")
        axis.set_xticks(ROUNDS, [f"{rounds:,}" for rounds in ROUNDS])
        axis.set_xticks([], minor=True)
        axis.set_xlabel(f"rounds of {TAU} steps")
        axis.set_ylabel("% above AllReduce")
    yield path


RECIPE = TunedRecipe(
    name="rounds",
    title="Gap to AllReduce against rounds",
    text=f"GPT-2, two workers, τ = {TAU}, validation loss as trained; every method at the best of "
    "four learning rates, DiLoCo of five, for each number of rounds (rounds_trials), for 1,000 "
    "rounds at that of 300, with conf's outer settings. "
    f"The warm-up takes {WARM_UP:.0%} of the steps.",
    rows=ROWS,
    columns=tuple(map(column, ROUNDS)),
    scales=("smoke",),
    draw=draw,
    headline=figure,
    beside=tables,
    grids={
        row.name: at_rates(base, (*LOWER.get(base.name, ()), *RATES))
        for row, base in ({row: row for row in BASES} | VARIANTS | ALONE).items()
    }
    | {row.name: at_rates(row, rates) for row, rates in RIVALS.items()},
    tuned_in={name(rounds): trials_of(tuned) for rounds, tuned in TUNED_ROUNDS.items()},
)
