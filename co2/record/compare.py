"""Two runs side by side: their settings, their losses at common steps, their final figures.

    python -m co2 compare results/runs/gpt2/co2/tau12/seed0 results/runs/gpt2/co2/tau6/seed0

Ends with status 0 where all losses at common steps are equal, bit for bit, and with 1 where they
are not, or have no step in common. Either run may still train.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from co2.arguments import Parser
from co2.errors import REFUSED, ConfigError, first_line, require
from co2.record.files import whole_lines
from co2.record.folder import flat
from co2.record.metrics import Summary
from co2.record.table import Table

Found = TypeVar("Found")
Losses = dict[int, float | None]
"""By step. None is a loss that was not finite."""

_KINDS = {"train": "Training loss of worker 0", "eval": "Validation loss"}
"""Kinds of lines in metrics.jsonl that have a loss, and the titles of their tables."""
_NAMES = ("runs", "tag")
"""Settings that name a folder, and change nothing in a run."""
_FIGURES = ("train_s", "throughput", "exposed_s", "overlap", "bytes_per_step", "peak_memory_bytes")
"""What is shown of a summary beside its final metrics."""
_SHOWN = 20
"""Steps of a table, unless all are asked for."""


@dataclass(frozen=True)
class Told:
    """What a run's folder tells."""

    settings: dict[str, str]
    """By their full names, as JSON."""
    losses: dict[str, Losses]
    """By kind."""
    summary: Summary | None
    """None while the run has not finished."""

    @classmethod
    def read(cls, folder: Path) -> "Told":
        """The run in a folder. Raises `ConfigError` where there is none, or a file is damaged."""
        for name in ("config.yaml", "metrics.jsonl"):
            hint = f"has no {name}; give the folder of a run, such as …/seed0"
            require((folder / name).is_file(), "RUN", folder, hint)
        return cls(
            _read(folder, "config.yaml", _settings),
            _read(folder, "metrics.jsonl", _losses),
            _read(folder, "summary.json", lambda _: Summary.read(folder)),
        )


def _read(folder: Path, name: str, read: Callable[[Path], Found]) -> Found:
    try:
        return read(folder / name)
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise ConfigError("RUN", folder, f"{name} is damaged ({first_line(error)})") from None


def _settings(path: Path) -> dict[str, str]:
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError:
        values = None
    if not isinstance(values, dict):
        raise ValueError("it holds no settings")
    return {".".join(key): json.dumps(value) for key, value in flat(values).items()}


def _losses(path: Path) -> dict[str, Losses]:
    found: dict[str, Losses] = {kind: {} for kind in _KINDS}
    for line in whole_lines(path):
        if line["kind"] in found and "loss" in line:
            loss = line["loss"]
            found[line["kind"]][int(line["step"])] = None if loss is None else float(loss)
    return found


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
    compared = [settings(one.settings, other.settings)]
    for kind in _KINDS:
        compared.append(losses(kind, one.losses[kind], other.losses[kind], args.all))
    compared.append(figures(one.summary, other.summary))
    for table in compared:
        print(f"\n{table.page()}", end="")
    return 0 if equal(one.losses, other.losses) else 1


def equal(one: Mapping[str, Losses], other: Mapping[str, Losses]) -> bool:
    """Whether the losses of all common steps are the same bits, and there are such steps."""
    steps = [(kind, step) for kind in one for step in one[kind].keys() & other[kind].keys()]
    return bool(steps) and all(one[kind][step] == other[kind][step] for kind, step in steps)


def settings(one: Mapping[str, str], other: Mapping[str, str]) -> Table:
    """The settings that differ; a dash for one that a run does not know."""
    names = [name for name in {**one, **other} if name not in _NAMES]
    rows = [(name, one.get(name), other.get(name)) for name in names]
    differ = [row for row in rows if row[1] != row[2]]
    text = "" if differ else f"All {len(rows)} are the same."
    return Table(("setting", "A", "B"), differ, title="Settings that differ", text=text)


def losses(kind: str, one: Losses, other: Losses, whole: bool) -> Table:
    """The losses at common steps, and whether they are the same, bit for bit.

    Args:
        whole: show all steps.
    """
    steps = sorted(one.keys() & other.keys())
    differ = [step for step in steps if one[step] != other[step]]
    shown = steps if whole else sorted({*_spread(steps), *differ[:1]})
    rows = [(step, one[step], other[step], _difference(one[step], other[step])) for step in shown]
    return Table(
        ("step", "A", "B", "B - A"),
        rows,
        title=_KINDS[kind],
        text=_verdict(steps, differ, one, other),
        source=f"{len(shown)} of {len(steps)} steps; --all shows all." if shown != steps else "",
        formats={"A": _loss, "B": _loss, "B - A": _signed},
    )


def figures(one: Summary | None, other: Summary | None) -> Table:
    """The final metrics, and what the runs took."""
    lacking = [name for name, summary in (("A", one), ("B", other)) if summary is None]
    names = dict.fromkeys(
        f"final.{name}" for summary in (one, other) if summary for name in summary.final
    )
    rows = []
    for name in (*names, *_FIGURES) if len(lacking) < 2 else ():
        values = [None if summary is None else summary.value(name) for summary in (one, other)]
        rows.append((name, *values, _difference(*values)))
    return Table(
        ("figure", "A", "B", "B - A"),
        rows,
        title="Final figures",
        text=" ".join(f"{name} has not finished." for name in lacking),
        formats={"A": _figure, "B": _figure, "B - A": _signed},
    )


def _verdict(steps: Sequence[int], differ: Sequence[int], one: Losses, other: Losses) -> str:
    if not steps:
        return f"No step in common: A has {len(one)}, B has {len(other)}."
    if not differ:
        return f"Equal at all {len(steps)} common steps, bit for bit."
    first = differ[0]
    by = _difference(one[first], other[first])
    words = [
        f"{len(differ)} of {len(steps)} common steps differ.",
        f"The first is {first}: {_exact(one[first])} and {_exact(other[first])}"
        + ("." if by is None else f", a difference of {abs(by):.3g}."),
    ]
    sizes = {s: abs(d) for s in differ if (d := _difference(one[s], other[s])) is not None}
    if sizes:
        largest = max(sizes, key=sizes.__getitem__)
        words.append(f"The largest difference is {sizes[largest]:.3g}, at step {largest}.")
    return " ".join(words)


def _spread(steps: Sequence[int]) -> list[int]:
    """About as many as are shown, evenly spread, with the first and the last one."""
    if len(steps) <= _SHOWN:
        return list(steps)
    return [steps[round(at * (len(steps) - 1) / (_SHOWN - 1))] for at in range(_SHOWN)]


def _difference(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else other - one


def _exact(loss: float | None) -> str:
    return "not finite" if loss is None else repr(loss)


def _loss(loss: Any) -> str:
    return f"{loss:.6f}"


def _figure(value: Any) -> str:
    return f"{value:,.6g}"


def _signed(difference: Any) -> str:
    return "=" if difference == 0 else f"{difference:+,.3g}"


if __name__ == "__main__":
    sys.exit(main())
