"""Command lines of `python -m …` that say in one line what is wrong with them."""

import argparse
import math
from typing import NoReturn

from co2.errors import REFUSED, ConfigError, printable, require, require_number


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage, and whose flags are written out."""

    def __init__(self, **options: object) -> None:
        super().__init__(**{"allow_abbrev": False, **options})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"error: {printable(message)}\n")


def whole(flag: str, text: str, high: int | None = None, low: int = 1) -> int:
    """A flag's whole number. Raises `ConfigError` unless it is in the range."""
    good = text.strip().isdecimal() and low <= int(text) and (high is None or int(text) <= high)
    most = "" if high is None else f" and {high:,} or less"
    require(good, flag, text, f"must be a whole number, {low} or more{most}")
    return int(text)


def number(flag: str, text: str, low: float, high: float = math.inf) -> float:
    """A flag's number. Raises `ConfigError` unless it is in the range."""
    hint = f"must be a number of {low:g} or more" + (f", {high:g} at most" * (high < math.inf))
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(flag, text, hint) from None
    require_number(flag, value, low, hint)
    require(value <= high, flag, text, hint)
    return value
