"""What 0/1 Adam and 1-bit Adam send over one training, beside AllReduce, and what they learn.

Each row is a run of train.py in `--runs`, or one for each seed, and a finished run is not made
again: Ctrl-C, and go on later. With `--steps`, the freeze and the growth of intervals move along.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks import report
from recipes.cells import Cell, run

METHODS = ("allreduce", "onebit_adam", "zero_one_adam")
FREEZE, DOUBLE = 0.15, 0.14
"""Shares of the steps: until v stands still, and until the intervals of 0/1 Adam double."""
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="gpt2", help="with a loss in its evaluation")
    parser.add_argument("--steps", type=int, default=720, help="of the whole schedule")
    parser.add_argument("--warmup", type=int, default=60, help="steps of the learning rate's")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--runs", default="results/runs/zero_one_adam", help="where runs are kept")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    for seed in args.seeds.split(","):
        for method, summaries in found.items():
            cell = Cell(tuple(overrides(method, seed, args)))
            run([cell])
            summary = cell.summary()
            assert summary is not None, f"failed: {cell.command}"
            summaries.append(summary)
            print(f"{method} seed {seed}: loss {summary['final']['loss']:.4f}", flush=True)
    report.write(
        args.out / "zero_one_adam.md",
        "What Adam sends in signs",
        f"`task={args.task}`, {args.workers} workers, {args.steps} steps with {args.warmup} of "
        "warm-up, AdamW with the recipe's betas; v is frozen at step "
        f"{share(args.steps, FREEZE)} in both variants, and the intervals of 0/1 Adam double every "
        f"{share(args.steps, DOUBLE)} steps after it, up to 16. Bytes are what one worker sends; a "
        "round is a time that the replicas exchange anything. Mean over the seeds, ± standard "
        "deviation. Nothing in the table is from a paper. The paper of 0/1 Adam "
        "(arXiv 2202.06009) reports, of trainings many times as long on up to 128 GPUs, up to 87 % "
        "less data and 54 % fewer rounds than 1-bit Adam.",
        [
            "method",
            "KiB a step",
            "MiB in all",
            "of allreduce",
            "of onebit_adam",
            "rounds",
            "of onebit_adam",
            "validation loss",
            "seeds",
        ],
        [row(method, found) for method in METHODS],
    )


def share(steps: int, part: float) -> int:
    return max(1, round(part * steps))


def overrides(method: str, seed: str, args: argparse.Namespace) -> list[str]:
    given = [f"task={args.task}", f"method={method}", f"train.seed={seed}", "optim.name=adamw"]
    given += [f"train.steps={args.steps}", f"train.eval_every={args.steps}"]
    given += [f"optim.warmup_steps={args.warmup}", f"launch.workers={args.workers}"]
    given += ["log.wandb=disabled", f"runs={args.runs}", f"tag=steps{args.steps}"]
    if method != "allreduce":
        given.append(f"{method}.freeze_step={share(args.steps, FREEZE)}")
    if method == "zero_one_adam":
        given.append(f"{method}.double_every={share(args.steps, DOUBLE)}")
    return given


def row(method: str, found: dict[str, list[dict[str, Any]]]) -> list[str]:
    summaries = found[method]
    sent = {name: mean_of(own, sent_in) for name, own in found.items()}
    rounds = {name: mean_of(own, rounds_in) for name, own in found.items()}
    losses = [summary["final"]["loss"] for summary in summaries]
    spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
    return [
        method,
        f"{sent[method] / summaries[0]['steps'] / 1024:.1f}",
        f"{sent[method] / MIB:.1f}",
        f"{sent[method] / sent['allreduce']:.1%}",
        f"{sent[method] / sent['onebit_adam']:.1%}",
        f"{rounds[method]:.0f}",
        f"{rounds[method] / rounds['onebit_adam']:.1%}",
        f"{statistics.mean(losses):.4f}{spread}",
        str(len(losses)),
    ]


def mean_of(summaries: list[dict[str, Any]], figure: Any) -> float:
    return statistics.mean(figure(summary) for summary in summaries)


def sent_in(summary: dict[str, Any]) -> float:
    """Bytes of one worker in all."""
    return summary["bytes_per_step"] * summary["steps"]


def rounds_in(summary: dict[str, Any]) -> float:
    """AllReduce has one at every step, and does not count."""
    return summary.get("rounds", summary["steps"])


if __name__ == "__main__":
    main()
