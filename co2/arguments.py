"""Command lines of `python -m …` that say in one line what is wrong with them."""

import argparse
from typing import NoReturn

from co2.errors import REFUSED, printable


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage, and whose flags are written out."""

    def __init__(self, **options: object) -> None:
        super().__init__(**{"allow_abbrev": False, **options})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"error: {printable(message)}\n")
