"""Progress of slow preparations, on stderr: a bar for a person, one plain line for a log."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LONG = 1_000_000
"""Units of work that are worth a line; less is done before it is read."""


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show `what` while the block runs; the block reports units done by calling what it gets."""
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
