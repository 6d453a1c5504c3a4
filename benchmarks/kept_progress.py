"""CO2 with kept progress beside the best blocking method: validation loss at equal samples.

Every method is tuned over a grid of its own, as large as the others', with seed 0 and two replicas,
for every task and τ; what wins there is trained with every seed, and with four replicas too. Each
cell is a run of train.py in `--runs`, and a finished run is not made again: Ctrl-C, and go on
later.
"""

import argparse
import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import report
from recipes.cells import Cell, run

RECIPES = {
    "gpt2": (8, 480),
    "roberta": (64, 900),
    "resnet50": (64, 400),
    "vit": (64, 600),
}
"""Samples in a step of all replicas together, and steps. Elsewhere as conf/ has them at smoke
scale, where most are trained longer."""

Point = dict[str, float]
GRIDS: dict[str, list[Point]] = {
    "diloco": [
        {"outer_lr": 1.0, "outer_momentum": 0.0},
        {"outer_lr": 1.0, "outer_momentum": 0.4},
        {"outer_lr": 0.7, "outer_momentum": 0.9},
    ],
    "slowmo": [
        {"outer_lr": 1.0, "outer_momentum": 0.2},
        {"outer_lr": 1.0, "outer_momentum": 0.5},
        {"outer_lr": 1.0, "outer_momentum": 0.7},
    ],
    "co2_keep": [
        {"outer_momentum": 0.0, "momentum_weight": 0.0},
        {"outer_momentum": 0.5, "momentum_weight": 0.2},
        {"outer_momentum": 0.8, "momentum_weight": 0.2},
    ],
}
WHOLE = "co2_keep, delay τ"
"""With what wins at a delay of a quarter of τ."""
NAMES = ("allreduce", *GRIDS, WHOLE)
BLOCKING = ("diloco", "slowmo")
GOAL = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(RECIPES))
    parser.add_argument("--taus", default="12,48")
    parser.add_argument("--replicas", default="2,4")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--runs", default="results/runs/kept", help="where the runs are kept")
    parser.add_argument("--finished", action="store_true", help="only of runs that are there")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    rows = []
    for task, tau in itertools.product(args.tasks.split(","), args.taus.split(",")):
        setting = Setting(task, int(tau), args.runs)
        if not args.finished:
            setting.train(numbers(args.replicas), numbers(args.seeds))
        for replicas in numbers(args.replicas):
            rows += setting.rows(replicas, numbers(args.seeds))
    report.write(
        args.out / "kept_progress.md",
        "CO2 with kept progress beside blocking methods, at smoke scale",
        "Validation loss after as many samples, mean ± standard deviation over the seeds; the "
        "difference is to the same seeds of the better of the blocking methods, as a share of its "
        f"mean loss (goal: at most {GOAL:.0%}). Smoke-scale results of this code: nothing here is "
        "from a paper. Tuned with seed 0 and two replicas, each method over "
        f"{len(GRIDS['co2_keep'])} settings; AllReduce has nothing to tune. co2_keep's delay is a "
        "quarter of τ, so it overlaps fully wherever a collective takes at most τ/4 steps; with a "
        "delay of τ, wherever a method can.",
        ["task", "τ", "replicas", "method", "setting", "validation loss", "seeds", "difference"],
        rows,
    )


class Setting:
    """One task and τ: which cells, and what came out."""

    def __init__(self, task: str, tau: int, runs: str) -> None:
        self.task, self.tau, self.runs = task, tau, runs

    def train(self, replicas: Sequence[int], seeds: Sequence[int]) -> None:
        """Everything that is missing: the grids, then what won in them."""
        run(self.cell(m, point, 2, 0) for m, grid in GRIDS.items() for point in grid)
        won = [(name, self.best(name)) for name in NAMES]
        cells = itertools.product(won, replicas, seeds)
        run(self.cell(m, point, n, k) for (m, point), n, k in cells if point is not None)

    def cell(self, method: str, point: Point, replicas: int, seed: int) -> Cell:
        name, whole = method.partition(",")[0], method == WHOLE
        chosen = {"tau": self.tau, **point} if name != "allreduce" else {}
        if name == "co2_keep":
            chosen["delay"] = self.tau if whole else self.tau // 4
        batch, steps = RECIPES[self.task]
        overrides = [
            f"task={self.task}",
            f"method={name}",
            *(f"{name}.{key}={value:g}" for key, value in chosen.items()),
            f"train.batch_size={batch // replicas}",
            f"train.steps={steps}",
            f"train.eval_every={steps}",
            f"train.seed={seed}",
            f"launch.workers={replicas}",
            "checkpoint.every=0",
            "log.wandb=disabled",
            f"runs={self.runs}",
        ]
        return Cell(tuple(overrides))

    def loss(self, method: str, point: Point, replicas: int, seed: int) -> float | None:
        summary = self.cell(method, point, replicas, seed).summary()
        return None if summary is None else summary["final"]["loss"]

    def best(self, method: str) -> Point | None:
        """The point of a method's grid with the lowest loss; None while none has been trained."""
        if method == "allreduce":
            return {}
        method = method.partition(",")[0]
        losses = [(self.loss(method, point, 2, 0), point) for point in GRIDS[method]]
        found = [(loss, point) for loss, point in losses if loss is not None]
        return min(found, key=lambda pair: pair[0])[1] if found else None

    def rows(self, replicas: int, seeds: Sequence[int]) -> Iterator[list[str]]:
        """A line for every method that has runs."""
        points = {method: self.best(method) for method in NAMES}
        found = {m: self.losses(m, point, replicas, seeds) for m, point in points.items()}
        rivals = [found[method] for method in BLOCKING if found[method]]
        bound = min(rivals, key=lambda losses: statistics.mean(losses.values()), default={})
        for method, losses in found.items():
            if losses:
                setting = ", ".join(f"{k} {v:g}" for k, v in (points[method] or {}).items())
                yield [
                    *(self.task, str(self.tau), str(replicas), method, setting or "—"),
                    *(report.mean(list(losses.values())), str(len(losses))),
                    "the bound" if losses is bound else difference(losses, bound),
                ]

    def losses(
        self, method: str, point: Point | None, replicas: int, seeds: Sequence[int]
    ) -> dict[int, float]:
        """By seed, of the runs that are there."""
        if point is None:
            return {}
        losses = {seed: self.loss(method, point, replicas, seed) for seed in seeds}
        return {seed: loss for seed, loss in losses.items() if loss is not None}


def difference(losses: dict[int, float], bound: dict[int, float]) -> str:
    """Mean ± standard deviation of what a seed loses to the same seed, as a share of the bound."""
    pairs = [(losses[seed], bound[seed]) for seed in losses.keys() & bound.keys()]
    if not pairs:
        return "—"
    whole = statistics.mean(theirs for _, theirs in pairs)
    return report.mean([(own - theirs) / whole for own, theirs in pairs], ".1%", sign="+")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
