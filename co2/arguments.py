"""Command lines of `python -m …` that say in one line what is wrong with them."""

import argparse
from typing import Any, NoReturn

from co2.errors import REFUSED, printable


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage, whose flags are written out, and whose
    help has the lines of its description."""

    def __init__(self, **options: Any) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"allow_abbrev": False, "formatter_class": raw, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"error: {printable(message)}\n")
