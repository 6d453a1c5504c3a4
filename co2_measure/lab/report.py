"""The laboratory's table and figure: `cells.csv`, `table.md` and `throughput.png`."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

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


def write(found: Sequence[Measurement], out: Path, target_loss: float | None) -> None:
    """Write `cells.csv`, `table.md` and `throughput.png` into the folder `out`; print the table."""
    source = provenance()  # first, because the files written below would count as changed sources
    write_csv(found, out / "cells.csv", with_target=target_loss is not None)
    table = summary(found, source, target_loss)
    print(f"\n{table.markdown()}")
    (out / "table.md").write_text(table.page())
    draw(found, out / "throughput.png")


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
    """Throughput against bandwidth: a panel for each number of workers, a line for each method."""
    from matplotlib.figure import Figure

    medians = {
        key: statistics.median(one.throughput for one in repeats)
        for key, repeats in grouped(found).items()
    }
    panels = sorted({workers for workers, _, _ in medians})
    rates = sorted(
        {mbit for _, mbit, _ in medians},
        key=lambda mbit: float("inf" if mbit == "unlimited" else mbit),
    )
    figure = Figure(figsize=(1 + 5 * len(panels), 4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)
    for axis, workers in zip(axes[0], panels, strict=True):
        for method in dict.fromkeys(method for _, _, method in medians):
            at = [n for n, rate in enumerate(rates) if (workers, rate, method) in medians]
            values = [medians[workers, rates[n], method] for n in at]
            style = {"label": method, "marker": "o"}
            if method == LIMIT:
                style = {"label": "limit: no communication", "color": "black", "linestyle": "--"}
            if method == LIMIT and len(at) == 1:
                axis.axhline(values[0], **style)
            else:
                axis.plot(at, values, **style)
        axis.set_xticks(range(len(rates)), rates)
        axis.set_ylim(bottom=0)
        axis.set_title(f"{workers} workers")
        axis.set_xlabel("rate of every link, Mbit/s")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("throughput, all workers, 1/s")
    axes[0][-1].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _median(values: Sequence[float | None]) -> float | None:
    """None where a repeat has no value, so that no median hides it, and where none is there."""
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers and len(numbers) == len(values) else None
