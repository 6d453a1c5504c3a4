"""When a run saves: every so many steps, by the clock, or both.

All workers save after the same step, and their clocks differ. So they look at them together, at
steps that all know beforehand: with seconds of a step and the time since the last checkpoint they
say whether it is time, and at which step they look again.
"""

import time
from collections.abc import Callable

from co2.config import CheckpointConfig

_FIRST = 2
"""Steps after which they look for the first time."""
_GROWTH = 4
"""The next look is at most so many times as many steps away as they have trained."""
_NEAR = 0.1
"""What may be missing of the time, as a share of it."""

Look = tuple[int, float, float]
"""Of a worker: steps since it began; seconds since the last checkpoint; seconds of a step."""
Gather = Callable[[Look], list[Look]]
"""What each worker gives, of all workers. Collective."""


class SaveTimes:
    """The steps after which a run saves. `steps`: of the whole run."""

    def __init__(self, config: CheckpointConfig, steps: int, gather: Gather) -> None:
        self._every, self._every_s, self._steps = config.every, config.every_s, steps
        self._gather = gather
        self._saved_s = time.monotonic()
        self.begin(0)

    def begin(self, step: int) -> None:
        """So many steps are done, and workers begin to train or have come to those who do."""
        self._next, self._begun, self._looked = step + _FIRST, step, step
        self._looked_s = time.monotonic()

    def looks(self, step: int) -> bool:
        """Whether all look at their clocks after this step: `due` is collective then."""
        return self._every_s is not None and step >= self._next and step < self._steps

    def due(self, step: int) -> bool:
        """Whether to save after this step, which the caller then does."""
        told = self._looked_at(step) if self.looks(step) else False
        last = step == self._steps and (self._every > 0 or self._every_s is not None)
        due = told or last or (self._every > 0 and step % self._every == 0)
        if due:
            self._saved_s = time.monotonic()
        return due

    def _looked_at(self, step: int) -> bool:
        assert self._every_s is not None
        now = time.monotonic()
        pace = (now - self._looked_s) / max(1, step - self._looked)
        trained, waited_s, pace = max(self._gather((step - self._begun, now - self._saved_s, pace)))
        self._looked, self._looked_s = step, now
        left_s = self._every_s - waited_s
        is_time = left_s <= _NEAR * self._every_s
        if is_time:
            left_s = self._every_s
        ahead = left_s / pace if pace > 0 else self._steps
        self._next = step + max(1, int(min(ahead, _GROWTH * max(1, trained))))
        return is_time
