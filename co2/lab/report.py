"""The laboratory's table and figure: `cells.csv`, `table.md` and `throughput.png`."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from co2.lab.measurement import Measurement, write_csv
from co2.lab.trial import LIMIT
from co2.record.provenance import provenance
from co2.record.table import NOTHING, Table


def write(found: Sequence[Measurement], out: Path, target_loss: float | None) -> None:
    """Write `cells.csv`, `table.md` and `throughput.png` into the folder `out`; print the table."""
    source = provenance()  # first, because the files written below would count as changed sources
    out.mkdir(parents=True, exist_ok=True)
    write_csv(found, out / "cells.csv", with_target=target_loss is not None)
    table = summary(found, source, target_loss)
    print(f"\n{table.markdown()}")
    (out / "table.md").write_text(table.page())
    draw(found, out / "throughput.png")


def summary(found: Sequence[Measurement], source: str, target_loss: float | None = None) -> Table:
    """A table with one line for each number of workers, rate and method."""
    head = ["workers", "Mbit/s", "method", "per s", "of the limit", "exposed", "overlap"]
    head += ["comm s", "MB per step", "loss"]
    head += [] if target_loss is None else [f"s to loss {target_loss:g}"]
    lines = []
    for (workers, mbit, method), repeats in grouped(found).items():
        shares = shares_of_limit(repeats, found)
        cells = [
            str(workers),
            mbit,
            method,
            f"{median_throughput(repeats):,.0f}",
            f"{statistics.median(shares):.1%}" if shares else NOTHING,
            f"{statistics.median(one.exposed_share for one in repeats):.1%}",
            _median([one.overlap for one in repeats], ".3f"),
            _median([one.comm_s for one in repeats], ".2f"),
            f"{statistics.median(one.bytes_per_step for one in repeats) / 1e6:.3f}",
            f"{statistics.median(one.loss for one in repeats):.3f}",
        ]
        if target_loss is not None:
            cells.append(_median([one.target_s for one in repeats], ".0f"))
        lines.append(cells)
    return Table(
        head=head,
        rows=lines,
        title="Throughput on slow links",
        text="Medians over the repeats; shares of the limit are taken within a repeat. The limit "
        "is the same training without communication (method none). Times are seconds of training.",
        source=source,
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
    limits = {
        (one.workers, one.mbit, one.repeat): one.throughput
        for one in measured
        if one.method == LIMIT
    }
    keyed = [((one.workers, one.mbit, one.repeat), one.throughput) for one in repeats]
    return [own / limits[key] for key, own in keyed if key in limits]


def median_throughput(repeats: Iterable[Measurement]) -> float:
    """The median over the repeats, in units per second of all workers."""
    return statistics.median(one.throughput for one in repeats)


def draw(found: Sequence[Measurement], path: Path) -> None:
    """Throughput against bandwidth: a panel for each number of workers, a line for each method."""
    from matplotlib.figure import Figure

    groups = grouped(found)
    panels = sorted({workers for workers, _, _ in groups})
    rates = sorted({mbit for _, mbit, _ in groups}, key=_rate)
    figure = Figure(figsize=(1 + 5 * len(panels), 4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)
    for axis, workers in zip(axes[0], panels, strict=True):
        for method in dict.fromkeys(method for _, _, method in groups):
            at = [n for n, rate in enumerate(rates) if (workers, rate, method) in groups]
            values = [median_throughput(groups[workers, rates[n], method]) for n in at]
            limit = method == LIMIT
            style = {"color": "black", "linestyle": "--"} if limit else {"marker": "o"}
            label = "limit: no communication" if limit else method
            if limit and len(at) == 1:
                axis.axhline(values[0], label=label, **style)
            else:
                axis.plot(at, values, label=label, **style)
        axis.set_xticks(range(len(rates)), rates)
        axis.set_ylim(bottom=0)
        axis.set_title(f"{workers} workers")
        axis.set_xlabel("rate of every link, Mbit/s")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("throughput, all workers, 1/s")
    axes[0][-1].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _rate(mbit: str) -> float:
    return float("inf") if mbit == "unlimited" else float(mbit)


def _median(values: Sequence[float | None], form: str) -> str:
    """The median as text; a dash where a repeat has no value, so that no median hides it."""
    numbers = [value for value in values if value is not None]
    return format(statistics.median(numbers), form) if len(numbers) == len(values) else NOTHING
