"""Cells trained by `recipes.runs.cells.run` in a process that need not import everything first.

Run as a program: `trained.py REQUEST RESULT`. Its workers are forked from it, where those of a test
would be new interpreters; see tests/server.py.
"""

import dataclasses
import pickle
import sys
from collections.abc import Iterable
from pathlib import Path

from recipes.runs import cells
from recipes.runs.cells import TrainCell
from tests.cli.harness import LIMIT_S
from tests.server import environment, fork_program


def trained(wanted: Iterable[TrainCell], place: Path) -> tuple[dict[TrainCell, int], list[str]]:
    """What `run` returns, and the lines that it prints.

    Args:
        wanted: the cells, whose commands are those of the working folder.
        place: a folder for the files of request and result.
    """
    request, result, log = (place / name for name in ("request", "result", "log"))
    result.unlink(missing_ok=True)
    request.write_bytes(pickle.dumps((cells.APP.conf, list(wanted))))
    with log.open("w") as file:
        words, out = [__file__, str(request), str(result)], file.fileno()
        process = fork_program(words, Path.cwd(), environment(), out, out)
        assert process.wait(LIMIT_S) == 0, log.read_text()
    failed, lines = pickle.loads(result.read_bytes())
    return failed, lines


def _main(request: str, result: str) -> None:
    conf, wanted = pickle.loads(Path(request).read_bytes())
    cells.APP = dataclasses.replace(cells.APP, conf=conf)
    lines: list[str] = []
    failed = cells.run(wanted, lines.append)
    Path(result).write_bytes(pickle.dumps((failed, lines)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
