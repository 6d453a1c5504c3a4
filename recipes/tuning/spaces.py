"""What is tuned: the learning rate of every method on one grid, and the knobs of its own.

Beside each knob stands what its paper used or recommends; these values are always among those that
are tried, and so is conf's own. τ, what a method sends, such as averaged moments, and how long it
may take are no knobs: they are what a comparison is about. So is `shard`, which changes no weights.
"""

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from co2.config import Config

Value = str | float | bool | None
RATE = "optim.lr"
RATE_STEP = 2**0.5
"""Factor between two learning rates of the grid."""
RATE_REACH = 4
"""Steps of the grid on either side of conf's learning rate, before it widens: a factor of 4."""


class Unit(Enum):
    """What a knob's values are counted in."""

    plain = "plain"
    steps = "steps"
    """Shares of the run's steps, so that a short trial and a whole run mean the same."""
    rounds = "rounds"
    """Multiples of τ."""
    parts = "parts"
    """Parts of a round, of which each has a step at least: at most τ."""


@dataclass(frozen=True)
class Knob:
    """A number to tune: the values to try at first, and how far it may go beyond them."""

    key: str
    """Its name in the method's node."""
    values: tuple[float, ...]
    """Rising; their places count from 0."""
    low: float = 0.0
    """End of the legal range; also where the range does not contain it."""
    high: float = math.inf
    unit: Unit = Unit.plain

    def at(self, place: int) -> float:
        """The value at a place, also at one beyond the values."""
        if 0 <= place < len(self.values):
            return self.values[place]
        side = 1 if place > 0 else -1
        return self._beyond(self.at(place - side), self.at(place - 2 * side), side)

    def goes_beyond(self, place: int, side: int) -> bool:
        """Whether there is a further place on this side, 1 or −1: not at the legal end."""
        return self.at(place) != (self.high if side > 0 else self.low)

    def _beyond(self, end: float, before: float, side: int) -> float:
        """The next value. The distance to the legal end, or the value where there is no such end,
        changes by the same factor as last."""
        limit = self.high if side > 0 else self.low
        if math.isinf(limit):
            return float(f"{end * end / before:.3g}")
        return round(limit - side * float(f"{(end - limit) ** 2 / abs(before - limit):.3g}"), 9)


_OUTER_LR = Knob("outer_lr", (0.25, 0.35, 0.5, 0.7, 1.0, 1.4))
"""One grid for all. The searches of 12 trials that ended at 0.7 and at 1, the least and the most
there was, are why it goes beyond both. A constant gap Λ of CO2 is α/Λ."""
_MOMENTUM = Knob("outer_momentum", (0.0, 0.2, 0.4, 0.6, 0.8, 0.9), high=1.0)
_OUTER = (_OUTER_LR, _MOMENTUM)
_PULL = Knob("pull", (0.3, 0.4, 0.5, 0.6, 0.7, 0.8), high=1.0)

KNOBS: Mapping[str, tuple[Knob, ...]] = {
    # SlowMo (1910.00643): α = 1, and β tuned for each task.
    "slowmo": _OUTER,
    # DiLoCo (2311.08105): 0.7 and 0.9. 1 and 0 together are local SGD.
    "diloco": _OUTER,
    "eager_diloco": _OUTER,
    "streaming_diloco": (
        *_OUTER,
        # Streaming DiLoCo (2501.18512): 0.5, and three layers in each fragment.
        Knob("mixing", (0.0, 0.25, 0.5, 0.75, 1.0), high=1.0),
        Knob("fragments", (1, 2, 4), low=1, high=12, unit=Unit.parts),
    ),
    # Overlap-Local-SGD (2002.09539): 0.6 and 0.7.
    "overlap_local_sgd": (_PULL, _MOMENTUM),
    # CO2 (2401.16265) names neither its outer rate nor its momentum. Its gap is no knob: the
    # paper's and ours are rows of their own.
    "co2": _OUTER,
    # The released code: 1, and 0.5 or 0.2.
    "co2_released": _OUTER,
    "co2_keep": (
        # Ours: docs/co2_keep.md has why κ lies near 0.62. β is conf's.
        Knob("keep_local", (0.25, 0.38, 0.5, 0.62, 0.75, 0.87, 1.0), high=1.0),
        Knob("momentum_weight", (0.0, 0.1, 0.15, 0.2, 0.3)),
        # Each takes τ/P steps for its mean, and all are as well hidden.
        Knob("fragments", (1, 4, 12), low=1, high=12, unit=Unit.parts),
    ),
    "sparseloco": (
        # SparseLoCo (2508.15706): density 0.01 to 0.03; its public code: α = 1, decay 0.95.
        Knob("density", (0.01, 0.02, 0.03), high=1.0),
        _OUTER_LR,
        Knob("error_decay", (0.8, 0.9, 0.95, 0.99), high=1.0),
    ),
    "noloco": (
        # NoLoCo (2506.10911), its public code: 0.7, 0.5 and 0.7. β² < 1 − γ/2.
        _OUTER_LR,
        Knob("outer_momentum", (0.0, 0.2, 0.4, 0.5, 0.6), high=0.7),
        Knob("pull", (0.3, 0.5, 0.7, 1.0), high=1.0),
    ),
    "desloc": (
        # DES-LOC (2505.22549): 3 and 6 times τ. 1 and 1 are Local Adam.
        Knob("first_moment_every", (1, 2, 3, 6), low=1, unit=Unit.rounds),
        Knob("second_moment_every", (1, 3, 6, 12), low=1, unit=Unit.rounds),
    ),
    "mt_dao": (
        # MT-DAO (2510.05361): β about 0.999; QHAdam (1810.06801): ω = 0.7 and β = 0.995.
        Knob("slow_beta", (0.98, 0.99, 0.995, 0.999), high=1.0),
        Knob("slow_weight", (0.3, 0.5, 0.7, 0.9), high=1.0),
    ),
    "demo": (
        # DeMo's public code: decay 0.999, 32 of blocks of 64 x 64.
        Knob("decay", (0.9, 0.99, 0.999), high=1.0),
    ),
    "onebit_adam": (
        # 1-bit Adam (2102.02888): 15 to 20 % of training.
        Knob("freeze_step", (0.05, 0.1, 0.15, 0.2, 0.3), high=1.0, unit=Unit.steps),
    ),
    "zero_one_adam": (
        # 0/1 Adam (2202.06009): the end of the warm-up, which is 3 to 11 % in our tasks.
        Knob("freeze_step", (0.05, 0.1, 0.15, 0.2, 0.3), high=1.0, unit=Unit.steps),
    ),
}
"""By method. One that is not here has all its trials for the learning rate."""
HELD: Mapping[str, Mapping[str, Value]] = {
    # τ/P, so that its means are hidden as long as those of co2_keep's fragments.
    "streaming_diloco": {"delay": None},
}
"""By method, settings that all its trials have."""

Places = Mapping[str, int]
"""Of every number to tune, by its full name: where it is among its values."""


@dataclass(frozen=True)
class Space:
    """The numbers to tune for one method on one task."""

    knobs: Mapping[str, Knob]
    """By full name, the learning rate first; with conf's own values among the others."""
    start: Places
    """conf's own values."""
    held: Mapping[str, Value] = field(default_factory=dict)
    """What is not tuned, by full name."""

    @classmethod
    def of(cls, config: Config, moments: bool = False) -> "Space":
        """The space around a configuration as conf has it, with conf's own τ.

        Args:
            moments: whether inner moments are averaged, which fragments do not.
        """
        own, rate, reach = vars(config.method_config), config.optim.lr, RATE_REACH
        rates = tuple(float(f"{rate * RATE_STEP**n:.4g}") for n in range(-reach, reach + 1))
        knobs, start = {RATE: Knob(RATE, rates)}, {RATE: reach}
        for knob in KNOBS.get(config.method, ()):
            if moments and knob.unit is Unit.parts:
                continue
            default = own[knob.key]
            if knob.unit in (Unit.steps, Unit.rounds):
                default /= config.train.steps if knob.unit is Unit.steps else own["tau"]
            name, place = f"{config.method}.{knob.key}", bisect.bisect_left(knob.values, default)
            if default not in knob.values:
                values = (*knob.values[:place], default, *knob.values[place:])
                knob = replace(knob, values=values)
            knobs[name], start[name] = knob, place
        held = HELD.get(config.method, {}).items()
        return cls(knobs, start, {f"{config.method}.{key}": value for key, value in held})

    def words(self, places: Places, steps: int, tau: object) -> dict[str, Value]:
        """The settings of a run by their full names.

        Args:
            places: as proposed.
            steps: of the run.
            tau: its τ; None for a method without one.
        """
        found: dict[str, Value] = dict(self.held)
        for name, knob in self.knobs.items():
            value = knob.at(places[name])
            if knob.unit is not Unit.plain:
                whole = steps if knob.unit is Unit.steps else tau
                assert isinstance(whole, int)
                parts = knob.unit is Unit.parts
                value = min(int(value), whole) if parts else max(1, round(value * whole))
            found[name] = value
        return found


def is_beyond(config: Config, name: str, value: Value) -> bool:
    """Whether a setting, by its full name, lies beyond what is tried at first."""
    knob = Space.of(config).knobs[name]
    if knob.unit is not Unit.plain or not isinstance(value, int | float):
        return False
    return not knob.values[0] <= value <= knob.values[-1]


def in_steps(method: str, name: str) -> bool:
    """Whether a setting, by its full name, is a number of steps that grows with the run's."""
    knob = _knob(method, name)
    return knob is not None and knob.unit is Unit.steps


def at_legal_end(method: str, name: str, value: Value, tau: object) -> bool:
    """Whether a setting, by its full name, can go no further."""
    knob = _knob(method, name)
    if knob is None or knob.unit is Unit.steps:
        return False
    whole = int(str(tau)) if knob.unit is Unit.rounds else 1
    most = min(knob.high, int(str(tau))) if knob.unit is Unit.parts else knob.high * whole
    return value in (knob.low * whole, most)


def _knob(method: str, name: str) -> Knob | None:
    """The knob of a setting, by its full name; None for a setting of no method, as the rate."""
    return next((knob for knob in KNOBS.get(method, ()) if name == f"{method}.{knob.key}"), None)
