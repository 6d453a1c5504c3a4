"""What Adam sends over published trainings, worked out from their schedules alone.

    python -m recipes run zero_one_volume                  no training: a second

Bits and rounds of AllReduce under Adam, of 1-bit Adam and of 0/1 Adam are a pure function of the
steps, of the step at which v is frozen, and of the learning rate. Expected: 0/1 Adam sends 12 to
22 % of 1-bit Adam's bits, in 40 to 67 % of its rounds.

The schedules are in published.py, with their sources.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from co2.methods import zero_one_adam
from recipes.recipe import Recipe, Row
from recipes.runs.cells import SummaryJSON
from recipes.runs.functions import FunctionCell, FunctionColumn
from recipes.signs.published import TRAININGS, Training

BITS = 16
"""Bits of an element that is sent uncompressed: the paper trains in half precision."""
KAPPA, LONGEST = 16, 16
"""κ and the longest interval of 0/1 Adam. Source: the paper."""


@dataclass(frozen=True)
class Sent:
    """What one training sends."""

    bits: float
    """Bits for each parameter, over all steps."""
    rounds: int
    """Times that the replicas exchange anything."""


def allreduce(training: Training) -> Sent:
    """The gradient, at every step."""
    return Sent(BITS * training.steps, training.steps)


def onebit_adam(training: Training) -> Sent:
    """The gradient until v is frozen, then one bit."""
    exact = min(training.freeze_step, training.steps)
    return Sent(BITS * exact + (training.steps - exact), training.steps)


def zero_one_adam_(training: Training) -> Sent:
    """The gradient at refreshes of v, and one bit at every step of T_u, refreshes among them: in
    the paper both travel then."""
    refreshes, step = 0, 0
    while step < min(training.warmup, training.steps):
        step += zero_one_adam.refresh_interval(refreshes, KAPPA)
        refreshes += 1
    rounds, step = 0, 0
    while step < training.steps:
        rounds += 1
        if step < training.warmup:
            step += 1
        else:
            since = step - training.warmup
            step += zero_one_adam.interval(LONGEST, training.lr(step), since, None)
    return Sent(BITS * refreshes + rounds, rounds)


METHODS = {
    "AllReduce": ("method=allreduce", allreduce),
    "1-bit Adam": ("method=onebit_adam", onebit_adam),
    "0/1 Adam": ("method=zero_one_adam", zero_one_adam_),
}


def evaluate(cells: Sequence[FunctionCell]) -> None:
    """Work out the figures of these cells, for all trainings at once."""
    by_word = dict(METHODS.values())
    for cell in cells:
        found: dict[str, float] = {}
        for name, training in TRAININGS.items():
            sent = by_word[f"method={cell.settings['method']}"](training)
            found[f"{name} bits"] = sent.bits / training.steps
            found[f"{name} rounds"] = float(sent.rounds)
        cell.finish(found, workers=1, steps=0)


def _final(summary: SummaryJSON, name: str) -> float:
    return float(summary["final"][name])


def _least(of: str) -> Callable[[SummaryJSON, SummaryJSON], float | None]:
    def compare(summary: SummaryJSON, base: SummaryJSON) -> float:
        names = [f"{name} {of}" for name in TRAININGS]
        return min(100 * _final(summary, name) / _final(base, name) for name in names)

    return compare


def _columns() -> list[FunctionColumn]:
    columns = []
    for name in TRAININGS:
        for title, figure, of, digits in (
            ("bits a parameter and step", "bits", None, 3),
            ("volume, % of 1-bit Adam's", "bits", "1-bit Adam", 1),
            ("rounds, % of 1-bit Adam's", "rounds", "1-bit Adam", 1),
        ):

            def read(summary: SummaryJSON, key: str = f"{name} {figure}") -> float:
                return _final(summary, key)

            columns.append(
                _column(f"{name}: {title}", metric=read, of=of, digits=digits, part=title)
            )
    for figure, title in (("bits", "volume"), ("rounds", "rounds")):
        columns.append(
            _column(
                f"least of the four: {title}, % of 1-bit Adam's",
                metric="final",
                of="1-bit Adam",
                compare=_least(figure),
                digits=1,
                part=f"{title}, % of 1-bit Adam's",
            )
        )
    return columns


def _column(name: str, **rest: object) -> FunctionColumn:
    return FunctionColumn(name, (), lower=True, curve=False, train=evaluate, **rest)  # type: ignore[arg-type]


_SOURCES = "; ".join(f"{name}: {training.source}" for name, training in TRAININGS.items())

RECIPE = Recipe(
    name="zero_one_volume",
    title="What Adam sends in signs, by the published schedules",
    text=f"Nothing is trained: bits and rounds follow from the schedules. An uncompressed element "
    f"has {BITS} bits, a compressed one has 1; scales are left out. The paper's shares are its "
    f"best, and it does not say here of which training. {_SOURCES}.",
    rows=tuple(Row(name, (word,)) for name, (word, _) in METHODS.items()),
    columns=tuple(_columns()),
    seeds=(0,),
    scales=("smoke",),
)
