"""The metrics of runs side by side, step by step: as CSV, or drawn.

    python -m co2 metrics results/runs/gpt2/*/*/seed0 > losses.csv
    python -m co2 metrics results/runs/gpt2/*/*/seed0 --figure eval/loss exposed_s --plot runs.png

Columns are named by what differs in the runs' folders. A field is empty where a run has not
recorded the figure at that step, or where it was not finite. A run may still train.
"""

import io
import math
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from co2 import program

with program.starting(__name__, slow=False):
    from co2.arguments import Parser
    from co2.atomic import durable
    from co2.errors import REFUSED, ConfigError, nearest, require, unusable
    from co2.record.compare import Series, Told
    from co2.record.metrics import unit_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALL, LOSS = "all", "loss"
Curves = dict[str, dict[str, Series]]
"""By figure, then by run."""

_ENDINGS = (".png", ".svg")
_FEW = 30
"""A curve of so many points shows each of them."""
_UNSAID = ("", "1", "units/s")
"""Units that would tell a reader nothing beside the figure's name."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns 0; 2 for what is no run, or cannot be shown."""
    parser = Parser(prog="python -m co2 metrics", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    text = "such as eval/loss, or loss for train/loss and eval/loss (default); all: every figure"
    parser.add_argument("--figure", nargs="+", metavar="NAME", help=text, default=[LOSS])
    text = "write the CSV into FILE; without it, it is printed unless --plot is given"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    text = f"draw the figures into FILE, which ends in {' or '.join(_ENDINGS)}"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=text)
    args = parser.parse_args(argv)
    try:
        if args.plot is not None:
            hint = f"must end in {' or '.join(_ENDINGS)}"
            require(args.plot.suffix in _ENDINGS, "--plot", args.plot, hint)
        curves = chosen(read(args.runs), args.figure)
        if args.plot is not None:
            picture = io.BytesIO()
            drawn(curves).savefig(picture, format=args.plot.suffix[1:], dpi=150)
            _write(args.plot, picture.getvalue())
        if args.out is not None:
            _write(args.out, as_csv(curves).encode())
        elif args.plot is None:
            print(as_csv(curves), end="")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    return 0


def read(runs: Sequence[Path]) -> Curves:
    """All figures of the runs, each by the name of `names`. Raises `ConfigError`."""
    found: Curves = {}
    for name, folder in zip(names(runs), runs, strict=True):
        for figure, series in Told.read(folder).series.items():
            if series:
                found.setdefault(figure, {})[name] = series
    require(bool(found), "RUN", runs[0], "has recorded no metrics yet")
    return found


def names(runs: Sequence[Path]) -> list[str]:
    """A name for each run: its path without the folders, at both ends, that all have in common;
    none for a single run. Raises `ConfigError` for a run that is given twice."""
    if len(runs) == 1:
        return [""]
    paths = [run.resolve().parts for run in runs]
    for number, path in enumerate(paths):
        require(path not in paths[:number], "RUN", runs[number], "is given twice")
    for end in (0, -1):
        while min(map(len, paths)) > 1 and len({path[end] for path in paths}) == 1:
            paths = [path[1:] if end == 0 else path[:-1] for path in paths]
    return ["/".join(path) for path in paths]


def chosen(curves: Curves, figures: Sequence[str]) -> Curves:
    """The figures with these names. Raises `ConfigError` for one that no run has.

    Args:
        figures: full names, or patterns of such; or, without a slash, the ends of full names; or
            `ALL`.
    """
    patterns = {name: name if "/" in name else f"*/{name}" for name in figures}
    patterns |= {name: "*" for name in figures if name == ALL}
    known = {*curves, *(name.partition("/")[2] for name in curves)}
    for name, pattern in patterns.items():
        found = any(fnmatch(figure, pattern) for figure in curves)
        require(found, "--figure", name, f"no run has recorded it; {nearest(name, known)}")
    return {
        figure: curves[figure]
        for pattern in patterns.values()
        for figure in curves
        if fnmatch(figure, pattern)
    }


def as_csv(curves: Curves) -> str:
    """A line for each step, with a column for each figure of each run."""
    import pandas

    columns = {
        f"{run} {figure}".lstrip(): series
        for figure, by_run in curves.items()
        for run, series in by_run.items()
    }
    # As they stand in metrics.jsonl: a whole number has no fraction here either.
    frame = pandas.DataFrame(columns, dtype=object).sort_index()
    return frame.to_csv(index_label="step")


def drawn(curves: Curves) -> "Figure":
    """A panel for each figure, with a curve for each run; its colour is the same in all."""
    from matplotlib.figure import Figure

    wide = min(3, len(curves))
    high = math.ceil(len(curves) / wide)
    figure = Figure(figsize=(5 * wide, 3.4 * high), layout="constrained")
    runs = list(dict.fromkeys(run for by_run in curves.values() for run in by_run))
    looks = {
        run: {"color": f"C{number % 10}", "linestyle": ("-", "--", ":", "-.")[number // 10 % 4]}
        for run, number in zip(runs, count())
    }
    lines = {}
    panels = figure.subplots(high, wide, squeeze=False).flat
    for (name, by_run), axis in zip(curves.items(), panels, strict=False):
        for run, series in by_run.items():
            steps = sorted(series)
            values = [math.nan if series[step] is None else series[step] for step in steps]
            marker = "o" if len(steps) <= _FEW else None
            (lines[run],) = axis.plot(steps, values, marker=marker, markersize=3, **looks[run])
        unit = unit_of(name)
        axis.set(xlabel="steps", ylabel=name if unit in _UNSAID else f"{name} ({unit})")
        axis.grid(alpha=0.3)
    for axis in panels:  # those that are left
        axis.set_axis_off()
    if len(lines) > 1:
        figure.legend(lines.values(), lines, loc="outside lower center", ncols=wide, frameon=False)
    return figure


def _write(path: Path, content: bytes) -> None:
    """Write a file, and its folder. Raises `ConfigError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with durable(path) as file:
            file.write(content)
    except OSError as error:
        raise unusable(error) from None
    print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    program.run(main)
