"""The laboratory's table and figure: `cells.csv`, `table.md` and `throughput.svg`."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from co2.record import drawing
from co2.record.provenance import provenance
from co2.record.table import Table
from co2_measure.lab.measurement import Measurement, write_csv
from co2_measure.lab.trial import LIMIT

_FORMATS = {
    "per s": "{:,.0f}".format,
    "of the limit": "{:.1%}".format,
    "exposed": "{:.1%}".format,
    "overlap": "{:.3f}".format,
    "comm s": "{:.2f}".format,
    "MB per step": "{:.3f}".format,
    "loss": "{:.3f}".format,
}
_NO_RATE = ("unlimited", "inf")
_ASIDE = 0.04
"""In the figure, from one method to the next: or bars would hide each other."""


def write(found: Sequence[Measurement], out: Path, target_loss: float | None) -> None:
    """Write `cells.csv`, `table.md` and `throughput.svg` into the folder `out`; print the table."""
    source = provenance()  # first, because the files written below would count as changed sources
    write_csv(found, out / "cells.csv", with_target=target_loss is not None)
    table = summary(found, source, target_loss)
    print(f"\n{table.markdown()}")
    (out / "table.md").write_text(table.page())
    draw(found, out / "throughput.svg")


def summary(found: Sequence[Measurement], source: str, target_loss: float | None = None) -> Table:
    """A table with one line for each number of workers, rate and method."""
    formats = dict(_FORMATS)
    if target_loss is not None:
        formats[f"s to loss {target_loss:g}"] = "{:.0f}".format
    lines = []
    for key, repeats in grouped(found).items():
        values = (
            [one.throughput for one in repeats],
            shares_of_limit(repeats, found),
            [one.exposed_share for one in repeats],
            [one.overlap for one in repeats],
            [one.comm_s for one in repeats],
            [one.bytes_per_step / 1e6 for one in repeats],
            [one.loss for one in repeats],
            [one.target_s for one in repeats],  # not shown where no target was given
        )
        lines.append([*key, *(_median(of_repeats) for of_repeats in values[: len(formats)])])
    return Table(
        head=["workers", "Mbit/s", "method", *formats],
        rows=lines,
        title="Throughput on slow links",
        text="Medians over the repeats; shares of the limit are taken within a repeat. The limit "
        "is the same training without communication (method none). Times are seconds of training.",
        source=source,
        formats=formats,
    )


def grouped(found: Iterable[Measurement]) -> dict[tuple[int, str, str], list[Measurement]]:
    """The repeats of each (workers, rate, method)."""
    groups: dict[tuple[int, str, str], list[Measurement]] = {}
    for one in found:
        groups.setdefault((one.workers, one.mbit, one.method), []).append(one)
    return groups


def shares_of_limit(repeats: Iterable[Measurement], measured: Iterable[Measurement]) -> list[float]:
    """Throughput against that of the limit in the same repeat, at the same rate and workers.

    Repeats without such a limit among `measured` are left out.
    """

    def key(one: Measurement) -> tuple[int, str, int]:
        return one.workers, one.mbit, one.repeat

    limits = {key(one): one.throughput for one in measured if one.method == LIMIT}
    return [one.throughput / limits[key(one)] for one in repeats if key(one) in limits]


def draw(found: Sequence[Measurement], path: Path) -> None:
    """Share of the limit against bandwidth: panels for each number of workers, a line for each
    method through the medians over the repeats, with bars from the least to the most."""
    shares = {key: shares_of_limit(repeats, found) for key, repeats in grouped(found).items()}
    shares = {key: own for key, own in shares.items() if own and key[2] != LIMIT}
    rates = sorted({rate for _, rate, _ in shares}, key=lambda rate: float(rate.replace(*_NO_RATE)))
    counts = sorted({workers for workers, _, _ in shares})
    known = dict.fromkeys((workers, method) for workers, _, method in shares)
    parts = [
        (workers, methods)
        for workers in counts
        for methods in drawing.split([method for count, method in known if count == workers])
    ]
    with drawing.panels(path, [f"{workers} workers" for workers, _ in parts]) as axes:
        for axis, (workers, methods) in zip(axes, parts, strict=True):
            for number, method in enumerate(methods):
                places = [
                    (at, shares.get((workers, rate, method))) for at, rate in enumerate(rates)
                ]
                aside = _ASIDE * (number - (len(methods) - 1) / 2)
                own = {at + aside: values for at, values in places if values}
                means = {at: 100 * statistics.median(values) for at, values in own.items()}
                bars = [
                    [means[at] - 100 * min(values) for at, values in own.items()],
                    [100 * max(values) - means[at] for at, values in own.items()],
                ]
                drawing.points(axis, means, bars, label=method, **drawing.look(method))
            axis.axhline(100, label="no communication", **drawing.LIMIT)
            axis.set_xticks(range(len(rates)), rates)
            axis.set_ylim(bottom=0)
            axis.set_xlabel("rate of every link, Mbit/s")
            axis.set_ylabel("throughput, % of that\nwithout communication")


def _median(values: Sequence[float | None]) -> float | None:
    """None where a repeat has no value, so that no median hides it, and where none is there."""
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers and len(numbers) == len(values) else None
