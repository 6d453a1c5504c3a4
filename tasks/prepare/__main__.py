"""Prepare a data set, or check one that is there: python -m tasks.prepare NAME [--check PATH]"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from co2.arguments import Parser
from co2.errors import ConfigError, require, unusable
from tasks.prepare import ade20k, glue, graph, imagenet, openwebtext, shapenet, wikibooks


class DataSet(Protocol):
    """The interface of a module that prepares a data set."""

    HELP: str
    """Help text: tasks that use the data set, size, licence, source and layout of the files. The
    first line is the summary in the list of data sets."""

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add the data set's own options; --root and --check are added for all."""

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


SETS: dict[str, type[DataSet]] = {
    "ade20k": ade20k,  # type: ignore[dict-item]  # a module serves as well
    "glue": glue,  # type: ignore[dict-item]  # a module serves as well
    "graph": graph,  # type: ignore[dict-item]  # a module serves as well
    "imagenet": imagenet,  # type: ignore[dict-item]  # a module serves as well
    "openwebtext": openwebtext,  # type: ignore[dict-item]  # a module serves as well
    "shapenet": shapenet,  # type: ignore[dict-item]  # a module serves as well
    "wikibooks": wikibooks,  # type: ignore[dict-item]  # a module serves as well
}
_SHOWN = 50
"""Number of faults that are printed; the others are only counted."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0; 1 for a data set with faults; 2 for a wrong
    value; 130 for Ctrl-C."""
    options = _parser().parse_args(argv)
    chosen = SETS[options.name]
    try:
        if options.check is not None:
            return _report(chosen, Path(options.check), options)
        print(chosen.run(options))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {unusable(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on where it stopped", file=sys.stderr)
        return 130
    return 0


def _report(chosen: type[DataSet], path: Path, options: argparse.Namespace) -> int:
    require(path.exists(), "--check", path, "no such folder")
    faults = 0
    for fault in chosen.check(path, options):
        faults += 1
        if faults <= _SHOWN:
            print(fault, flush=True)
    if faults > _SHOWN:
        print(f"and {faults - _SHOWN} more")
    print(f"{path}: {faults} faults" if faults else f"{path}: sound")
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m tasks.prepare",
        description=__doc__.splitlines()[0],
        epilog="docs/data.md has sizes, licences and trees.",
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
        own.add_argument("--check", metavar="PATH", help="look through a finished data set instead")
        chosen.arguments(own)
    return parser


if __name__ == "__main__":
    sys.exit(main())
