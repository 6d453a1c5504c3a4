"""The whole field on one page: bytes, rounds, throughput on slow links, and validation loss.

Losses are those of runs that recipes use too, made where they are missing: Ctrl-C, and go on later.
Throughput is the laboratory's, measured before, as root:

    python -m co2.lab --mbit 20,100 --methods … --out results/field/gpt2
    python -m co2.lab --mbit 20,100 --methods … --out results/field/resnet50 task=resnet50
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from co2.lab.measurement import Measurement, read_csv
from co2.lab.report import grouped, shares_of_limit
from co2.methods import METHODS
from recipes.cells import Cell, run
from recipes.recipe import RUNS
from recipes.table2 import SHORT

RECIPES = {"gpt2": SHORT, "resnet50": ()}
NEEDS = {"onebit_adam": "adamw", "zero_one_adam": "adamw"}
"""Inner optimizer of a method that takes no other."""
RATES = ("20", "100")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(RECIPES))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--runs", default=RUNS, help="where the runs are kept")
    parser.add_argument("--finished", action="store_true", help="only of runs that are there")
    parser.add_argument("--out", type=Path, default=Path("results/field"))
    args = parser.parse_args()
    methods, seeds = args.methods.split(","), args.seeds.split(",")
    rows: list[list[str]] = []
    for task in args.tasks.split(","):
        fit = [method for method in methods if task == "gpt2" or method not in NEEDS]
        cells = {m: [cell(task, m, seed, args.runs) for seed in seeds] for m in fit}
        if not args.finished:
            # Every method has one seed before any has two.
            run(cells[method][i] for i in range(len(seeds)) for method in fit)
        rows += table(task, cells, measured(args.out / task / "cells.csv"))
    draw(rows, args.out / "field.png")
    report.write(
        args.out / "table.md",
        "The field, at smoke scale",
        "Two workers, the settings of conf/method as they are. Validation loss after as many "
        "samples, mean ± standard deviation over the seeds. Rounds: collectives of one worker in "
        "the training, buckets not counted. Throughput on links of 20 and 100 Mbit/s: share of "
        "that of the same training without communication, from the laboratory "
        "(results/field/TASK/table.md). Smoke-scale results of this code: nothing here is from a "
        "paper.",
        [
            *("task", "method", "bytes per step", "rounds", "20 Mbit/s", "100 Mbit/s"),
            *("validation loss", "seeds"),
        ],
        rows,
    )


def cell(task: str, method: str, seed: str, runs: str) -> Cell:
    overrides = [f"task={task}", "scale=smoke", *RECIPES[task], f"method={method}"]
    return Cell((*overrides, f"train.seed={seed}", f"runs={runs}", "log.wandb=disabled"))


def measured(path: Path) -> list[Measurement]:
    """What the laboratory measured; nothing where it has not been."""
    return read_csv(path) if path.exists() else []


def table(
    task: str, cells: dict[str, list[Cell]], laboratory: Sequence[Measurement]
) -> Iterator[list[str]]:
    """A line for every method that has a run."""
    groups = grouped(laboratory)
    for method, same in cells.items():
        summaries = [s for s in (c.summary() for c in same) if s is not None]
        if summaries:
            shares = [shares_of_limit(groups.get((2, r, method), []), laboratory) for r in RATES]
            losses = [summary["final"]["loss"] for summary in summaries]
            yield [
                *(task, method, f"{summaries[0]['bytes_per_step']:,.0f}"),
                str(rounds(same[0], summaries[0])),
                *(f"{statistics.median(found):.1%}" if found else "not run" for found in shares),
                *(report.mean(losses), str(len(losses))),
            ]


def draw(rows: Sequence[Sequence[str]], path: Path) -> None:
    """A panel for each task and rate: throughput to the right, loss downwards, a dot a method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(row[0] for row in rows))
    size = (3 + 5 * len(RATES), 4 * max(1, len(tasks)))
    figure, axes = pyplot.subplots(
        max(1, len(tasks)), len(RATES), figsize=size, squeeze=False, layout="constrained"
    )
    marks = dict(zip(METHODS, "osD^v<>phX*P", strict=True))
    for panels, task in zip(axes, tasks, strict=False):
        for column, (axis, rate) in enumerate(zip(panels, RATES, strict=True), start=4):
            for row in rows:
                if row[0] == task and row[column] != "not run":
                    share, loss = float(row[column].rstrip("%")), float(row[6].split()[0])
                    axis.plot(share, loss, marks[row[1]], label=row[1])
            axis.set_title(f"{task}, {rate} Mbit/s")
            axis.set_xlim(0, 125)
            axis.set_xlabel("throughput, % of the limit")
            axis.set_ylabel("validation loss")
            axis.grid(alpha=0.3)
    if tasks:
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def rounds(one: Cell, summary: dict[str, Any]) -> int:
    """Told by the method, or one collective every τ steps: of each fragment, where it has some."""
    config = one.config().method_config
    every = getattr(config, "tau", 1)
    return int(summary.get("rounds", summary["steps"] // every * getattr(config, "fragments", 1)))


if __name__ == "__main__":
    main()
