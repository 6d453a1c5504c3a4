"""What the laboratory measured, as CSV, Markdown and a figure."""

import csv
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from co2.record.provenance import provenance

Row = dict[str, Any]


def write(rows: Sequence[Row], out: Path, target_loss: float | None) -> None:
    """`<out>/cells.csv`, `table.md` and `throughput.png`; prints the table."""
    source = provenance()  # before files of ours make the source tree a changed one
    out.mkdir(parents=True, exist_ok=True)
    with (out / "cells.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    table = markdown(rows, target_loss)
    print(f"\n{table}")
    intro = (
        "Medians over the repeats; shares of the limit are taken within a repeat. The limit is "
        "the same training without communication (method none). Times are seconds of training."
    )
    text = f"# Throughput on slow links\n\n{intro}\n\n{table}\n\n{source}\n"
    (out / "table.md").write_text(text)
    draw(rows, out / "throughput.png")


def markdown(rows: Sequence[Row], target_loss: float | None = None) -> str:
    """One line for each number of workers, rate and method."""
    head = ["workers", "Mbit/s", "method", "per s", "of the limit", "exposed", "overlap"]
    head += ["comm s", "MB per step", "loss"]
    head += [] if target_loss is None else [f"s to loss {target_loss:g}"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for (workers, mbit, method), found in grouped(rows).items():
        shares = shares_of_limit(found, rows)
        cells = [
            str(workers),
            mbit,
            method,
            f"{_median(found, 'throughput'):,.0f}",
            f"{statistics.median(shares):.1%}" if shares else "—",
            f"{_median(found, 'exposed_share'):.1%}",
            _text(_median(found, "overlap"), ".3f"),
            _text(_median(found, "comm_s"), ".2f"),
            f"{_median(found, 'bytes_per_step') / 1e6:.3f}",
            f"{_median(found, 'loss'):.3f}",
        ]
        if target_loss is not None:
            cells.append(_text(_median(found, "target_s"), ".0f"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def grouped(rows: Iterable[Row]) -> dict[tuple[int, str, str], list[Row]]:
    """The repeats of each cell."""
    groups: dict[tuple[int, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["workers"], row["mbit"], row["method"]), []).append(row)
    return groups


def shares_of_limit(found: Sequence[Row], rows: Sequence[Row]) -> list[float]:
    """Throughput against that of `none` in the same repeat, at the same rate and workers."""
    limits = {
        (row["workers"], row["mbit"], row["repeat"]): row["throughput"]
        for row in rows
        if row["method"] == "none"
    }
    keys = [(row["workers"], row["mbit"], row["repeat"]) for row in found]
    return [
        row["throughput"] / limits[key]
        for row, key in zip(found, keys, strict=True)
        if key in limits
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Throughput against bandwidth: a panel for each number of workers, a line for each method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = grouped(rows)
    panels = sorted({workers for workers, _, _ in groups})
    rates = sorted({mbit for _, mbit, _ in groups}, key=_rate)
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(1 + 5 * len(panels), 4), squeeze=False, layout="constrained"
    )
    for axis, workers in zip(axes[0], panels, strict=True):
        for method in dict.fromkeys(method for _, _, method in groups):
            at = [n for n, rate in enumerate(rates) if (workers, rate, method) in groups]
            values = [_median(groups[workers, rates[n], method], "throughput") for n in at]
            style = {"color": "black", "linestyle": "--"} if method == "none" else {"marker": "o"}
            label = "limit: no communication" if method == "none" else method
            if method == "none" and len(at) == 1:
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
    pyplot.close(figure)


def _rate(mbit: str) -> float:
    return float("inf") if mbit == "unlimited" else float(mbit)


def _median(rows: Sequence[Row], key: str) -> Any:
    """Of what was measured; None where nothing was, or where a repeat never came to it."""
    values = [row[key] for row in rows]
    return None if None in values else statistics.median(values)


def _text(value: float | None, form: str) -> str:
    return "—" if value is None else format(value, form)
