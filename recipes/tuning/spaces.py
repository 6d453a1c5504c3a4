"""What is tuned: the learning rate of every method on one grid, and the knobs of its own.

Beside each knob stands what its paper used or recommends; these values are always among those that
are tried, and so is conf's own. τ, what a method sends, such as averaged moments, and how long it
may take are no knobs: they are what a comparison is about. So is `shard`, which changes no weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from co2.config import Config

Value = str | float | bool
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


@dataclass(frozen=True)
class Knob:
    """A setting of a method, and the values to try."""

    key: str
    """Its name in the method's node."""
    values: tuple[Value, ...]
    unit: Unit = Unit.plain


_NESTEROV = (
    # DiLoCo (2311.08105): 0.7 and 0.9. 1 and 0 together are local SGD.
    Knob("outer_lr", (0.5, 0.7, 1.0)),
    Knob("outer_momentum", (0.0, 0.2, 0.4, 0.6, 0.9)),
)

KNOBS: Mapping[str, tuple[Knob, ...]] = {
    "slowmo": (
        # SlowMo (1910.00643): α = 1, and β tuned for each task.
        Knob("outer_lr", (0.7, 1.0)),
        Knob("outer_momentum", (0.0, 0.2, 0.4, 0.5, 0.6, 0.7)),
    ),
    "diloco": _NESTEROV,
    "eager_diloco": _NESTEROV,
    "streaming_diloco": (
        *_NESTEROV,
        # Streaming DiLoCo (2501.18512): 0.5.
        Knob("mixing", (0.0, 0.25, 0.5, 0.75)),
    ),
    "overlap_local_sgd": (
        # Overlap-Local-SGD (2002.09539): 0.6 and 0.7.
        Knob("pull", (0.4, 0.5, 0.6, 0.7, 0.8)),
        Knob("outer_momentum", (0.0, 0.3, 0.5, 0.7, 0.8)),
    ),
    "co2": (
        # CO2 (2401.16265) names neither its outer rate nor its momentum. The gap of its released
        # code is a constant; 2 is stable with momentum where 1 is not. gap_aware becomes unstable
        # as the rate falls.
        Knob("gap_penalty", ("gap_aware_steady", "none", 2.0)),
        Knob("outer_lr", (0.7, 1.0)),
        Knob("outer_momentum", (0.0, 0.2, 0.4)),
    ),
    "co2_released": (
        # The released code: 1, and 0.5 or 0.2.
        Knob("outer_lr", (0.7, 1.0)),
        Knob("outer_momentum", (0.0, 0.2, 0.5)),
    ),
    "co2_keep": (
        # Ours: docs/co2_keep.md has why κ lies there. β is conf's.
        Knob("keep_local", (0.5, 0.62, 0.75)),
        Knob("momentum_weight", (0.0, 0.15)),
    ),
    "sparseloco": (
        # SparseLoCo (2508.15706): density 0.01 to 0.03; its public code: α = 1, decay 0.95.
        Knob("density", (0.01, 0.02, 0.03)),
        Knob("outer_lr", (0.5, 0.7, 1.0, 1.4)),
        Knob("error_decay", (0.8, 0.9, 0.95, 0.99)),
    ),
    "noloco": (
        # NoLoCo (2506.10911), its public code: 0.7, 0.5 and 0.7. β² < 1 − γ/2.
        Knob("outer_lr", (0.5, 0.7, 1.0)),
        Knob("outer_momentum", (0.0, 0.2, 0.5, 0.6)),
        Knob("pull", (0.5, 0.7, 1.0)),
    ),
    "desloc": (
        # DES-LOC (2505.22549): 3 and 6 times τ. 1 and 1 are Local Adam.
        Knob("first_moment_every", (1, 2, 3, 6), Unit.rounds),
        Knob("second_moment_every", (1, 3, 6, 12), Unit.rounds),
    ),
    "mt_dao": (
        # MT-DAO (2510.05361): β about 0.999; QHAdam (1810.06801): ω = 0.7 and β = 0.995.
        Knob("slow_beta", (0.98, 0.99, 0.995, 0.999)),
        Knob("slow_weight", (0.3, 0.5, 0.7, 0.9)),
    ),
    "demo": (
        # DeMo's public code: decay 0.999, 32 of blocks of 64 x 64.
        Knob("decay", (0.9, 0.99, 0.999)),
    ),
    "onebit_adam": (
        # 1-bit Adam (2102.02888): 15 to 20 % of training.
        Knob("freeze_step", (0.1, 0.15, 0.2, 0.3), Unit.steps),
    ),
    "zero_one_adam": (
        # 0/1 Adam (2202.06009): the end of the warm-up, which is 3 to 11 % in our tasks.
        Knob("freeze_step", (0.05, 0.1, 0.15, 0.2, 0.3), Unit.steps),
    ),
}
"""By method. One that is not here has all its trials for the learning rate."""


@dataclass(frozen=True)
class Space:
    """The values to try for one method on one task."""

    method: str
    rate: float
    """conf's learning rate, in the middle of the grid."""
    knobs: tuple[Knob, ...]
    """With conf's own values among the others."""
    defaults: Mapping[str, Value]
    """conf's own values, by key."""

    @classmethod
    def of(cls, config: Config) -> "Space":
        """The space around a configuration as conf has it, with conf's own τ."""
        own = vars(config.method_config)
        knobs: list[Knob] = []
        defaults: dict[str, Value] = {}
        for knob in KNOBS.get(config.method, ()):
            default = own[knob.key]
            if knob.unit is not Unit.plain:
                default /= config.train.steps if knob.unit is Unit.steps else own["tau"]
            values = knob.values if default in knob.values else (*knob.values, default)
            if not any(isinstance(value, str) for value in values):
                values = tuple(sorted(values, key=float))
            knobs.append(replace(knob, values=values))
            defaults[knob.key] = default
        return cls(config.method, config.optim.lr, tuple(knobs), defaults)

    def words(
        self, rate: int, chosen: Mapping[str, Value], steps: int, tau: object
    ) -> dict[str, Value]:
        """The settings of a run by their full names.

        Args:
            rate: place of the learning rate on the grid; 0 is conf's.
            chosen: values of the knobs.
            steps: of the run.
            tau: its τ; None for a method without one.
        """
        found: dict[str, Value] = {"optim.lr": float(f"{self.rate * RATE_STEP**rate:.4g}")}
        for knob in self.knobs:
            value = chosen[knob.key]
            if knob.unit is not Unit.plain:
                whole = steps if knob.unit is Unit.steps else tau
                assert isinstance(whole, int) and isinstance(value, int | float)
                value = max(1, round(value * whole))
            found[f"{self.method}.{knob.key}"] = value
        return found
