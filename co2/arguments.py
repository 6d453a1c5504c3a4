"""Command lines of `python -m …` that say in one line what is wrong with them."""

import argparse
import inspect
import math
from typing import Any, NoReturn

from co2.errors import REFUSED, ConfigError, printable, require, require_number


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage, whose flags are written out, and whose
    help has the lines of its description."""

    def __init__(self, description: str | None = None, **options: Any) -> None:
        text = inspect.cleandoc(description or "")
        raw = argparse.RawDescriptionHelpFormatter
        given = {"allow_abbrev": False, "formatter_class": raw, **options}
        super().__init__(description=text, **given)

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
