"""The one error a user meets: a value, named by its key, with what would be right."""

import difflib
import math
from collections.abc import Iterable

REFUSED = 2
"""Exit status of a run that was refused, nearly always before it started."""
PREEMPTED = 75
"""Exit status of a run that was told to stop, saved, and can be continued (EX_TEMPFAIL)."""
DIVERGED = 65
"""Exit status of a run whose loss is not finite (EX_DATAERR)."""
STOPPED = (PREEMPTED, 130)
"""Exit statuses of a run that was told to stop: saved, or killed by a second Ctrl-C."""


class ConfigError(ValueError):
    """A value that cannot be run with. Prints as one line: `key=value: hint`."""

    def __init__(self, key: str, value: object, hint: str) -> None:
        super().__init__(f"{key}={value}: {hint}")
        self.key, self.value, self.hint = key, value, hint

    def under(self, node: str) -> "ConfigError":
        """The same error, with the node of the configuration that the key belongs to."""
        return ConfigError(f"{node}.{self.key}", self.value, self.hint)

    def __reduce__(self):
        return ConfigError, (self.key, self.value, self.hint)


def require(condition: bool, key: str, value: object, hint: str) -> None:
    """Raise `ConfigError(key, value, hint)` unless `condition` holds."""
    if not condition:
        raise ConfigError(key, value, hint)


def require_number(key: str, value: float, low: float, hint: str) -> None:
    """Raise `ConfigError` unless `value` is finite and at least `low`."""
    require(math.isfinite(value) and value >= low, key, value, hint)


def require_count(key: str, value: int) -> None:
    """Raise `ConfigError` unless `value` is a whole number of 1 or more."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole and value >= 1, key, value, "must be a whole number, 1 or more")


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that offers the known name nearest to `name`, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"
