"""CO2's kind of staleness gap, with every outer momentum and rate, and the rule β + α/Λ < 1.

    python -m recipes run gap                              its trials, then what won in them

Cost: 58 trials and 87 runs of 22 seconds on 2 cores, one hour.
Found (results/tables/gap.md): the rule tells stable settings from unstable ones, with few
exceptions; it does not rank those below 1. A constant gap is within 1 % of a computed one.

Λ is that of the last round, as the run's summary has it; for `gap_aware_elementwise` it is that of
an element which moves as far as the mean does. Every setting takes the better of two learning
rates, on a seed and on validation data that the table does not show.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from co2.record import drawing
from co2.record.table import Table
from recipes.recipe import Column, Row, Rows
from recipes.tables import figures
from recipes.tables.entries import by_seed, interval_text, percent_above
from recipes.tuning.tuning import TunedRecipe, at_rates, trial_column

GAPS = ("none", "1.5", "2", "3", "gap_aware", "gap_aware_elementwise", "gap_aware_steady")
KINDS = {
    "Λ constant: 1, 1.5, 2, 3": (GAPS[:4], "s"),
    "Λ: gap_aware": (GAPS[4:5], "^"),
    "Λ: gap_aware_elementwise": (GAPS[5:6], "D"),
    "Λ: gap_aware_steady": (GAPS[6:], "o"),
}
"""In the figure: the gaps of a kind, and its marker. The default's is filled."""
TICKS = (10, 20, 50)
OUTER_STEPS = (("0", "1"), ("0.2", "1"), ("0.4", "1"), ("0.2", "0.7"))
"""β and α."""
RATES = ("4e-3", "8e-3")
"""conf's, and twice as much: unstable settings want less, and others more."""
STEPS = 1200
ALLREDUCE = Row("AllReduce", ("method=allreduce",))


@dataclass(frozen=True)
class Setting:
    """CO2 with one kind of gap and one outer step."""

    gap: str
    momentum: str
    """β."""
    outer_rate: str
    """α."""

    @property
    def row(self) -> Row:
        words = (
            "method=co2",
            f"co2.gap_penalty={self.gap}",
            f"co2.outer_momentum={self.momentum}",
            f"co2.outer_lr={self.outer_rate}",
        )
        return Row(f"{self.gap}, β {self.momentum}, α {self.outer_rate}", words)

    def rule(self, gap: float) -> float:
        """β + α/Λ: below 1 the delayed outer step is stable in every direction."""
        return float(self.momentum) + float(self.outer_rate) / gap


SETTINGS = tuple(Setting(gap, *outer) for gap, outer in product(GAPS, OUTER_STEPS))


def schedule() -> tuple[str, ...]:
    """The overrides of every training."""
    words = (f"train.steps={STEPS}", f"train.eval_every={STEPS}")
    return ("task=gpt2", *words, f"optim.warmup_steps={STEPS // 24}", "checkpoint.every=0")


LOSS = Column("GPT-2", schedule(), "final.loss", lower=True, digits=4, curve=False)
GAP = Column("Λ at the end", schedule(), "gap", digits=3, curve=False, without=(ALLREDUCE.name,))
TRIAL = trial_column("GPT-2", schedule())


@dataclass(frozen=True)
class Point:
    """A setting that has run."""

    setting: Setting
    rule: float
    """β + α/Λ with the mean Λ of its runs."""
    losses: dict[int, float]
    """By seed."""


def points(ours: Rows) -> list[Point]:
    """The settings that have run, from the most stable to the least."""
    values = by_seed(ours)
    found = []
    for setting in SETTINGS:
        losses, gaps = (values.get((setting.row.name, column.name)) for column in (LOSS, GAP))
        if losses and gaps:
            rule = setting.rule(statistics.fmean(gaps.values()))
            found.append(Point(setting, rule, losses))
    return sorted(found, key=lambda point: point.rule)


def tables(ours: Rows, _: Rows) -> Iterator[Table]:
    """Every setting with its place on the rule's axis."""
    base = by_seed(ours).get((ALLREDUCE.name, LOSS.name), {})
    lines = [
        (
            point.setting.row.name,
            f"{point.rule:.3f}",
            "yes" if point.rule < 1 else "no",
            f"{statistics.fmean(point.losses.values()):.4f}",
            interval_text(percent_above(point.losses, base).values()),
        )
        for point in points(ours)
    ]
    if lines:
        yield Table(
            name="gap_rule",
            title="CO2's outer step and the rule β + α/Λ < 1",
            text="From the most stable setting to the least. Λ is that of the last round. The last "
            "column is the difference to AllReduce's loss of the same seed, with its 95 % t "
            "interval.",
            head=("setting", "β + α/Λ", "below 1", "loss", "% above AllReduce"),
            rows=lines,
        )


def draw(ours: Rows, stem: Path) -> Iterator[Path]:
    """Draw how far the loss is above AllReduce's over β + α/Λ, a marker for each kind of gap."""
    base = by_seed(ours).get((ALLREDUCE.name, LOSS.name), {})
    found = [
        (p, list(above.values())) for p in points(ours) if (above := percent_above(p.losses, base))
    ]
    if not found:
        return
    path = figures.beside(stem, "rule")
    with figures.panel(path, "CO2 on GPT-2: stability and loss") as axis:
        for label, (gaps, marker) in KINDS.items():
            own = [(point.rule, above) for point, above in found if point.setting.gap in gaps]
            x, y = [rule for rule, _ in own], [statistics.fmean(above) for _, above in own]
            bars = [figures.deviation(above) for _, above in own]
            style = drawing.look("co2") | {"marker": marker, "linestyle": "none", "label": label}
            face = {} if gaps == GAPS[-1:] else {"markerfacecolor": "none"}
            axis.errorbar(x, y, bars, capsize=3, **style, **face)
        axis.axvline(1.0, label="stable to the left of 1", **drawing.LIMIT)
        axis.set_yscale("log")
        axis.set_yticks(TICKS, [str(tick) for tick in TICKS])
        axis.set_yticks([], minor=True)
        axis.set_xlabel("β + α/Λ")
        axis.set_ylabel("loss, % above AllReduce's")
    yield path


ROWS = (ALLREDUCE, *(setting.row for setting in SETTINGS))
RECIPE = TunedRecipe(
    name="gap",
    title="CO2's kind of gap",
    text=f"GPT-2, two workers, τ = 12, {STEPS} steps; every setting at the better of two learning "
    "rates (gap_trials). A setting is the gap penalty, β and α. Λ of `gap_aware_elementwise` is "
    "that of an element which moves as far as the mean does.",
    rows=ROWS,
    columns=(LOSS, GAP),
    scales=("smoke",),
    draw=draw,
    beside=tables,
    grids={row.name: at_rates(row, RATES) for row in ROWS},
    tuned_in={LOSS.name: TRIAL, GAP.name: TRIAL},
)
