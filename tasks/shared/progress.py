"""Progress of slow preparations on stderr: a bar in a terminal, one plain line in a log."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LONG = 1_000_000
"""Units of work above which a log gets a line; less takes too short a time."""


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress while the block runs.

    Args:
        what: text of the line.
        total: units of work.
    Yields:
        A function that the block calls with the number of units it has done since the last call.
    """
    if not sys.stderr.isatty():
        if total > _LONG:
            print(what, file=sys.stderr, flush=True)
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task(what, total=total)
        yield lambda done: bar.advance(line, done)
