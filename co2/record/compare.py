"""Two runs side by side: their settings, their losses at common steps, their final figures.

    python -m co2 compare results/runs/gpt2/co2/tau12/seed0 results/runs/gpt2/co2/tau6/seed0

Ends with status 0 where all losses at common steps are equal, bit for bit, and with 1 where they
are not, or have no step in common. Either run may still train.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from co2.arguments import Parser
from co2.errors import REFUSED, ConfigError, first_line, require, unusable
from co2.record.files import DAMAGE, whole_lines
from co2.record.folder import settings
from co2.record.metrics import Summary, figures, flat
from co2.record.table import Table

Series = dict[int, float | None]
"""A figure by step. None was not finite."""
Figures = dict[str, float | None]
"""By their names in summary.json; empty while the run has not finished."""

LOSSES = {"train/loss": "Training loss of worker 0", "eval/loss": "Validation loss"}
"""The figures that are compared step by step, and the titles of their tables."""
_NAMES = ("runs", "tag")
"""Settings that name a folder, and change nothing in a run."""
_FIGURES = ("train_s", "throughput", "exposed_s", "overlap", "bytes_per_step", "peak_memory_bytes")
"""What is shown of a summary beside its final metrics."""
_SHOWN = 20
"""Steps of a table, unless all are asked for."""


@dataclass(frozen=True)
class Told:
    """What a run has recorded in its folder."""

    settings: dict[str, str]
    """By their full names, as JSON."""
    series: dict[str, Series]
    """The figures of metrics.jsonl, by full names such as `train/loss`."""
    figures: Figures

    @classmethod
    def read(cls, folder: Path) -> "Told":
        """The run in a folder. Raises `ConfigError` where there is none, or a file is damaged."""
        for name in ("config.yaml", "metrics.jsonl"):
            hint = f"has no {name}; give the folder of a run, such as …/seed0"
            require((folder / name).is_file(), "RUN", folder, hint)
        try:
            name = "config.yaml"
            values = {key: json.dumps(own) for key, own in flat(settings(folder / name)).items()}
            name = "metrics.jsonl"
            series: dict[str, Series] = {figure: {} for figure in LOSSES}
            for line in whole_lines(folder / name):
                for figure, value in figures(line).items():
                    series.setdefault(figure, {})[int(line["step"])] = value
            name = "summary.json"
            summary = Summary.read(folder)
            return cls(values, series, {} if summary is None else flat(summary.as_json()))
        except DAMAGE as error:
            raise ConfigError("RUN", folder, f"{name} is damaged ({first_line(error)})") from None
        except OSError as error:
            raise unusable(error) from None


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns 0 for equal losses; 1 for others; 2 for what is no run."""
    parser = Parser(
        prog="python -m co2 compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="a run's folder")
    every = f"print all common steps; otherwise about {_SHOWN}, and the first that differs"
    parser.add_argument("--all", action="store_true", help=every)
    args = parser.parse_args(argv)
    try:
        one, other = (Told.read(folder) for folder in args.runs)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    print("\n".join(f"{name}: {folder}" for name, folder in zip("AB", args.runs, strict=True)))
    tables = [_settings(one.settings, other.settings)]
    for name, title in LOSSES.items():
        tables.append(_losses(title, one.series[name], other.series[name], args.all))
    tables.append(_figures(one.figures, other.figures))
    for table in tables:
        print(f"\n{table.page()}", end="")
    pairs = [(one.series[name], other.series[name]) for name in LOSSES]
    common = [(a[step], b[step]) for a, b in pairs for step in a.keys() & b.keys()]
    return 0 if common and all(a == b for a, b in common) else 1


def _settings(one: Mapping[str, str], other: Mapping[str, str]) -> Table:
    """The settings that differ; a dash for one that a run does not know."""
    names = [name for name in {**one, **other} if name not in _NAMES]
    rows = [(name, one.get(name), other.get(name)) for name in names]
    differ = [row for row in rows if row[1] != row[2]]
    text = "" if differ else f"All {len(rows)} are the same."
    return Table(("setting", "A", "B"), differ, title="Settings that differ", text=text)


def _losses(title: str, one: Series, other: Series, whole: bool) -> Table:
    """The losses at common steps, all of them or some, and where they differ."""
    steps = sorted(one.keys() & other.keys())
    differ = [step for step in steps if one[step] != other[step]]
    by = {step: _difference(one[step], other[step]) for step in steps}
    shown = steps
    if not whole and len(steps) > _SHOWN:
        spread = {steps[round(at * (len(steps) - 1) / (_SHOWN - 1))] for at in range(_SHOWN)}
        shown = sorted(spread.union(differ[:1]))
    text = f"Equal at all {len(steps)} common steps, bit for bit."
    if not steps:
        text = f"No step in common: A has {len(one)}, B has {len(other)}."
    elif differ:
        first = differ[0]
        both = ["not finite" if own[first] is None else repr(own[first]) for own in (one, other)]
        text = f"{len(differ)} of {len(steps)} common steps differ. The first is {first}: "
        text += " and ".join(both)
        sizes = {step: abs(size) for step in differ if (size := by[step]) is not None}
        text += f", a difference of {sizes[first]:.3g}." if first in sizes else "."
        if sizes:
            largest = max(sizes, key=sizes.__getitem__)
            text += f" The largest difference is {sizes[largest]:.3g}, at step {largest}."
    return Table(
        ("step", "A", "B", "B - A"),
        [(step, one[step], other[step], by[step]) for step in shown],
        title=title,
        text=text,
        source=f"{len(shown)} of {len(steps)} steps; --all shows all." if shown != steps else "",
        formats={"A": "{:.6f}".format, "B": "{:.6f}".format, "B - A": _signed},
    )


def _figures(one: Figures, other: Figures) -> Table:
    """The final metrics, and what the runs took."""
    lacking = [name for name, own in (("A", one), ("B", other)) if not own]
    finals = [name for name in {**one, **other} if name.startswith("final.")]
    pairs = [(name, one.get(name), other.get(name)) for name in (*finals, *_FIGURES)]
    return Table(
        ("figure", "A", "B", "B - A"),
        [(name, a, b, _difference(a, b)) for name, a, b in pairs if one or other],
        title="Final figures",
        text=" ".join(f"{name} has not finished." for name in lacking),
        formats={"A": "{:,.6g}".format, "B": "{:,.6g}".format, "B - A": _signed},
    )


def _difference(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else other - one


def _signed(difference: float) -> str:
    return "=" if difference == 0 else f"{difference:+,.3g}"


if __name__ == "__main__":
    sys.exit(main())
