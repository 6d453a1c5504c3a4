"""Wall time on a slow link to the loss that AllReduce ends at on an unlimited one.

Each training is one of the laboratory's, which needs root; a finished one is not made again.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from co2.lab.measurement import time_to_loss
from co2.lab.training import train
from co2.lab.trial import Conditions, Trial

FIXED = ("task=gpt2", "gpt2.eval_samples=64")


@dataclass(frozen=True)
class Way:
    """One way to get there."""

    name: str
    method: str
    mbit: float | None
    steps: int
    every: int
    """Steps between evaluations, which find the time to within so many."""
    settings: tuple[str, ...] = ()

    def train(self, runs: Path) -> dict[str, Any]:
        """The summary of its training, from `runs` if it is there already."""
        words = (*FIXED, f"train.steps={self.steps}", f"train.eval_every={self.every}")
        trial = Trial(workers=2, mbit=self.mbit, method=self.method, repeat=0)
        folder = runs / re.sub("[^a-z0-9]+", "_", self.name.lower())
        return train(trial, Conditions(), folder, (*words, *self.settings))


SLOW = 20
KEEP = ("co2_keep.tau=12", "co2_keep.delay=8", "co2_keep.momentum_weight=0", "comm.dtype=bf16")
"""A mean takes fourteen steps on the slow link, and seven in bf16."""
WAYS = (
    Way("AllReduce, unlimited", "allreduce", None, 480, 24),
    Way("local SGD, τ = 48", "local_sgd", SLOW, 480, 24, ("local_sgd.tau=48",)),
    Way(
        *("DiLoCo, τ = 48", "diloco", SLOW, 480, 24),
        ("diloco.tau=48", "diloco.outer_lr=1", "diloco.outer_momentum=0.4"),
    ),
    Way("CO2, τ = 48", "co2", SLOW, 480, 24, ("co2.tau=48",)),
    Way(
        *("co2_keep, τ = 48", "co2_keep", SLOW, 480, 24),
        ("co2_keep.tau=48", "co2_keep.delay=16", "co2_keep.momentum_weight=0"),
    ),
    *(
        Way(f"co2_keep, τ = 12, bf16, {steps} steps", "co2_keep", SLOW, steps, 40, KEEP)
        for steps in (680, 760, 960)
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("results/runs/time_to_loss"))
    parser.add_argument("--out", type=Path, default=Path("results/field"))
    args = parser.parse_args()
    summaries = [way.train(args.runs) for way in WAYS]
    target, whole = summaries[0]["final"]["loss"], summaries[0]["train_s"]
    draw(summaries, target, args.out / "time_to_loss.png")
    report.write(
        args.out / "time_to_loss.md",
        "Time to the loss of AllReduce on an unlimited link",
        f"GPT-2 at smoke scale, two workers, one run each. The loss is {target:.3f}, where "
        f"AllReduce ends after {WAYS[0].steps} steps and {whole:.0f} s on links without a limit; "
        f"the others have links of {SLOW} Mbit/s. Every training decays its learning rate over its "
        "own steps, so a longer one is ahead of a shorter one at the same step of its second half. "
        "Seconds are of training, without evaluations, which find the time to within 24 or 40 "
        "steps. Nothing here is from a paper.",
        ["training", "steps", "exposed", "seconds", "validation loss", "s to the loss", "ratio"],
        [row(way, summary, target, whole) for way, summary in zip(WAYS, summaries, strict=True)],
    )


def row(way: Way, summary: dict[str, Any], target: float, whole: float) -> list[str]:
    reached = time_to_loss(Path(summary["folder"]), target)
    return [
        *(way.name, str(way.steps), f"{summary['exposed_share']:.1%}", f"{summary['train_s']:.0f}"),
        f"{summary['final']['loss']:.3f}",
        *(
            ("not reached", "—")
            if reached is None
            else (f"{reached:.0f}", f"{reached / whole:.2f}")
        ),
    ]


def draw(summaries: Sequence[dict[str, Any]], target: float, path: Path) -> None:
    """Validation loss against seconds of training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for way, summary in zip(WAYS, summaries, strict=True):
        lines = (Path(summary["folder"]) / "metrics.jsonl").read_text().splitlines()
        evals = [told for told in map(json.loads, lines) if told["kind"] == "eval"]
        seconds, losses = zip(*((told["train_s"], told["loss"]) for told in evals), strict=True)
        axis.plot(seconds, losses, "--" if way.mbit is None else "-", label=way.name)
    axis.axhline(target, color="gray", linewidth=1)
    axis.set_ylim(top=6)
    axis.set_xlabel(f"seconds of training, links of {SLOW} Mbit/s but for the dashed line")
    axis.set_ylabel("validation loss")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
