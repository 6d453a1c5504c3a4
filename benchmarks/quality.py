"""What every task learns at smoke scale under every method, beside its floor.

Each cell is a run of train.py in `--runs`, and a finished run is not made again: Ctrl-C, and go on
later. Seeds differ in weights, data order, augmentation and masks; validation data stay.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from co2.errors import ConfigError
from co2.methods import METHODS
from recipes import cells
from recipes.cells import Cell


@dataclass(frozen=True)
class Goal:
    """The figure that a task is judged by, and what it must reach."""

    metric: str
    floor: float | str
    """At least this; or the name of a baseline that the metric, a loss, must stay below."""


GOALS = {
    "resnet50": Goal("top1", 0.90),
    "vit": Goal("top1", 0.90),
    "ade20k": Goal("miou", 0.60),
    "shapenet": Goal("svm_accuracy", 0.90),
    "gpt2": Goal("loss", "unigram_entropy"),
    "roberta": Goal("loss", "unigram_entropy"),
    "transnormer": Goal("loss", "unigram_entropy"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(GOALS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--runs", default="results/runs/quality", help="where the runs are kept")
    parser.add_argument("--finished", action="store_true", help="only of runs that are there")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    tasks, methods = args.tasks.split(","), args.methods.split(",")
    found = {(task, method): [] for task in tasks for method in methods}  # type: ignore[var-annotated]
    done, whole = 0, len(found) * len(args.seeds.split(","))
    for seed in args.seeds.split(","):  # every cell has one seed before any has two
        for (task, method), summaries in found.items():
            done += 1
            summary = run(task, method, int(seed), args.runs, train=not args.finished)
            if summary is not None:
                summaries.append(summary)
                print(f"{done}/{whole}: {described(task, method, summary)}", flush=True)
    report.write(
        args.out / "quality.md",
        "What every task learns at smoke scale",
        "Two workers on two cores, embedded or generated data, the recipes of conf/ as they are: "
        "nothing here is from a paper or says anything about the paper's scale. Mean ± standard "
        "deviation over the seeds, on validation data. Waiting is the share of training time spent "
        "waiting for batches (goal: under 2 %); wall seconds are as they came, with whatever else "
        "the machine did.",
        ["task", "method", "metric", "measured", "seeds", "floor", "reached", "waiting", "wall s"],
        [row(task, method, summaries) for (task, method), summaries in found.items() if summaries],
    )


def run(task: str, method: str, seed: int, runs: str, train: bool) -> dict[str, Any] | None:
    """The summary of one run; where there is none, it is made now, or None if not to `train`."""
    overrides = (f"task={task}", f"method={method}", f"train.seed={seed}")
    cell = Cell((*overrides, "log.wandb=disabled", f"runs={runs}", "tag=quality"))
    try:
        if train:
            cells.run([cell])
        return cell.summary()
    except ConfigError as refused:  # variants of Adam, where the recipe's optimizer is SGD
        print(f"{task} {method}: not run, {refused}", flush=True)
        return None


def described(task: str, method: str, summary: dict[str, Any]) -> str:
    metric = GOALS[task].metric
    return f"{task} {method} seed {summary['seed']}: {metric} {summary['final'][metric]:.4f}"


def row(task: str, method: str, summaries: Sequence[dict[str, Any]]) -> list[str]:
    goal = GOALS[task]
    values = [summary["final"][goal.metric] for summary in summaries]
    if isinstance(goal.floor, str):
        bounds = [summary["baselines"][goal.floor] for summary in summaries]
        reached = sum(value < bound for value, bound in zip(values, bounds, strict=True))
        floor = f"< {bounds[0]:.3f} ({goal.floor.replace('_', ' ')})"
    else:
        reached, floor = sum(value >= goal.floor for value in values), f"≥ {goal.floor:.2f}"
    return [
        task,
        method,
        goal.metric.replace("_", " "),
        report.mean(values),
        str(len(values)),
        floor,
        f"{reached} of {len(values)}",
        f"{statistics.mean(summary['data_share'] for summary in summaries):.2%}",
        f"{statistics.mean(summary['wall_s'] for summary in summaries):.0f}",
    ]


if __name__ == "__main__":
    main()
