"""What is tried next: Optuna proposes, each setting once, on a grid that widens where it must."""

import itertools
import math
import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipes.tuning.spaces import RATE_REACH, Space, Value

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

SAMPLER_SEED = 1
AT_ONCE = 4
"""Proposals that are made without knowing each other's losses, so that they can be trained in the
same processes. As many are drawn at random before TPE chooses."""
_ATTEMPTS = 20
"""Proposals that were all made before, after which an untried one is drawn."""


@dataclass(frozen=True)
class Proposal:
    """A place in a method's space."""

    rate: int
    """Place of the learning rate on the grid; 0 is conf's."""
    chosen: Mapping[str, Value]
    """Values of the knobs."""

    @property
    def key(self) -> tuple[object, ...]:
        """Tells whether two proposals are the same."""
        return (self.rate, *self.chosen.values())


class Proposals:
    """The proposals for one method, in turn: conf's own settings first.

    The same losses lead to the same proposals, so that a search which was stopped goes on.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.low, self.high = -RATE_REACH, RATE_REACH
        """Ends of the learning rates' grid."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=SAMPLER_SEED, n_startup_trials=AT_ONCE)
        self.study = optuna.create_study(sampler=sampler)
        self._random = random.Random(SAMPLER_SEED)
        self._enqueue(Proposal(0, space.defaults))
        self._asked: dict[tuple[object, ...], optuna.Trial] = {}
        self._losses: dict[tuple[object, ...], tuple[float, Proposal]] = {}

    def ask(self) -> Proposal:
        """A setting that was not proposed before."""
        from optuna.trial import TrialState

        for _ in range(_ATTEMPTS):
            trial = self.study.ask(self._distributions())
            knobs = {knob.key: trial.params[knob.key] for knob in self.space.knobs}
            proposal = Proposal(trial.params["rate"], knobs)
            if proposal.key not in self._asked:
                self._asked[proposal.key] = trial
                return proposal
            self.study.tell(trial, state=TrialState.FAIL)
        self._enqueue(self._random.choice(self._untried()))
        return self.ask()

    def tell(self, proposal: Proposal, loss: float) -> None:
        """How well it did; infinite for a training that diverged or failed."""
        self.study.tell(self._asked[proposal.key], loss)
        self._losses[proposal.key] = loss, proposal

    def widen(self) -> None:
        """Let the grid of learning rates grow by one where the best so far sits on its border."""
        loss, best = min(self._losses.values(), key=lambda told: told[0])
        if math.isfinite(loss):
            self.low -= best.rate == self.low
            self.high += best.rate == self.high

    def at_border(self, proposal: Proposal) -> list[str]:
        """Names of the numbers beyond which nothing was tried; 0 is no border but a choice."""
        rates = [told.rate for _, told in self._losses.values()]
        found = ["optim.lr"] if proposal.rate in (min(rates), max(rates)) else []
        for knob in self.space.knobs:
            value = proposal.chosen[knob.key]
            ends = (knob.values[0], knob.values[-1])
            counted = all(type(other) in (int, float) for other in knob.values)
            if counted and value in ends and value != 0:
                found.append(f"{self.space.method}.{knob.key}")
        return found

    def _untried(self) -> list[Proposal]:
        """Every place that was not proposed; where there is none, the grid widens on both sides."""
        names = [knob.key for knob in self.space.knobs]
        choices = list(itertools.product(*(knob.values for knob in self.space.knobs)))
        left = [
            Proposal(rate, dict(zip(names, values, strict=True)))
            for rate in range(self.low, self.high + 1)
            for values in choices
            if (rate, *values) not in self._asked
        ]
        if left:
            return left
        self.low, self.high = self.low - 1, self.high + 1
        return self._untried()

    def _enqueue(self, proposal: Proposal) -> None:
        """Make it what Optuna proposes next."""
        from optuna.exceptions import ExperimentalWarning

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            self.study.enqueue_trial({"rate": proposal.rate, **proposal.chosen})

    def _distributions(self) -> "dict[str, BaseDistribution]":
        from optuna.distributions import CategoricalDistribution, IntUniformDistribution

        knobs = {knob.key: CategoricalDistribution(knob.values) for knob in self.space.knobs}
        return {"rate": IntUniformDistribution(self.low, self.high), **knobs}
