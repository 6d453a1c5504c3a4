"""Command lines of `python -m …` that say in one line what is wrong with them."""

import argparse
import inspect
from typing import Any, NoReturn

from co2.errors import REFUSED, printable


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
