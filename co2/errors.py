"""The one error a user meets: a value, named by its key, with what would be right."""

import difflib
import math
from collections.abc import Iterable


class ConfigError(ValueError):
    """A value that cannot be run with. Prints as one line: `key=value: mend`."""

    def __init__(self, key: str, value: object, mend: str) -> None:
        super().__init__(f"{key}={value}: {mend}")
        self.key, self.value, self.mend = key, value, mend

    def under(self, node: str) -> "ConfigError":
        """The same error, with the node of the configuration that the key belongs to."""
        return ConfigError(f"{node}.{self.key}", self.value, self.mend)

    def __reduce__(self):
        return ConfigError, (self.key, self.value, self.mend)


def require(condition: bool, key: str, value: object, mend: str) -> None:
    """Raise `ConfigError(key, value, mend)` unless `condition` holds."""
    if not condition:
        raise ConfigError(key, value, mend)


def require_number(key: str, value: float, low: float, mend: str) -> None:
    """Raise `ConfigError` unless `value` is finite and at least `low`."""
    require(math.isfinite(value) and value >= low, key, value, mend)


def require_count(key: str, value: int) -> None:
    """Raise `ConfigError` unless `value` is a whole number of 1 or more."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole and value >= 1, key, value, "must be a whole number, 1 or more")


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that offers the known name nearest to `name`, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"
