"""Prepare a data set, or look through one: python -m tasks.prepare NAME [--check|--verify PATH]"""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from co2 import program
from co2.arguments import Parser
from co2.errors import ConfigError, require, unusable
from tasks.prepare import (
    ade20k,
    fashion_mnist,
    glue,
    graph,
    imagenet,
    openwebtext,
    shapenet,
    wikibooks,
)


class DataSet(Protocol):
    """The interface of a module that prepares a data set."""

    HELP: str
    """Help text: tasks that use the data set, size, licence, source and layout of the files. The
    first line is the summary in the list of data sets."""

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the data set's own options; --root, --check and --verify are added for all."""

    @staticmethod
    def run(options: argparse.Namespace) -> str:
        """Make the data set below `options.root`, or continue where an earlier call stopped.

        Returns:
            The line that is printed at the end.
        Raises:
            ConfigError: a value cannot be used, or a file is missing; the hint says where to get
                it.
        """
        ...

    @staticmethod
    def check(path: Path, options: argparse.Namespace) -> Iterator[str]:
        """Yield one line for each fault in the finished data set at `path`."""
        ...

    @staticmethod
    def verify(path: Path) -> Iterator[str]:
        """Read and decode every sample at `path`, the data set or data of the user's own in its
        layout. Yield one line for each that is broken.

        Raises:
            ConfigError: a run would refuse the layout.
        """
        ...


SETS: dict[str, type[DataSet]] = {
    "ade20k": ade20k,  # type: ignore[dict-item]  # a module serves as well
    "fashion_mnist": fashion_mnist,  # type: ignore[dict-item]  # a module serves as well
    "glue": glue,  # type: ignore[dict-item]  # a module serves as well
    "graph": graph,  # type: ignore[dict-item]  # a module serves as well
    "imagenet": imagenet,  # type: ignore[dict-item]  # a module serves as well
    "openwebtext": openwebtext,  # type: ignore[dict-item]  # a module serves as well
    "shapenet": shapenet,  # type: ignore[dict-item]  # a module serves as well
    "wikibooks": wikibooks,  # type: ignore[dict-item]  # a module serves as well
}
_SHOWN = 50
"""Number of faults that --check prints; the others are only counted."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0; 1 for a data set with faults; 2 for a wrong
    value; 130 for Ctrl-C."""
    options = _parser().parse_args(argv)
    chosen = SETS[options.name]
    try:
        if options.check is not None:
            path = _existing("--check", options.check)
            return _report(path, chosen.check(path, options), _SHOWN)
        if options.verify is not None:
            path = _existing("--verify", options.verify)
            return _report(path, chosen.verify(path))
        print(chosen.run(options))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {unusable(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        looking = options.check is not None or options.verify is not None
        again = "begins again" if looking else "goes on where it stopped"
        print(f"stopped; the same command {again}", file=sys.stderr)
        return 130
    return 0


def _existing(key: str, path: str) -> Path:
    require(Path(path).exists(), key, path, "no such file or folder")
    return Path(path)


def _report(path: Path, faults: Iterator[str], shown: float = math.inf) -> int:
    number = 0
    for fault in faults:
        number += 1
        if number <= shown:
            print(fault, flush=True)
    if number > shown:
        print(f"and {number - shown} more")
    print(f"{path}: {number} faults" if number else f"{path}: sound")
    return 1 if number else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m tasks.prepare",
        description=__doc__.splitlines()[0],
        epilog="docs/data.md has sizes and licences.",
    )
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, chosen in SETS.items():
        own = names.add_parser(
            name,
            help=chosen.HELP.splitlines()[0],
            description=chosen.HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        own.add_argument("--root", default="data", help="where data live: data.root")
        looks = own.add_mutually_exclusive_group()
        check = "compare a finished data set with the published one instead"
        looks.add_argument("--check", metavar="PATH", help=check)
        verify = "read and decode every sample instead, also of data of your own in this layout"
        looks.add_argument("--verify", metavar="PATH", help=verify)
        chosen.arguments(own)
    return parser


if __name__ == "__main__":
    program.run(main)
