"""Throughput of GPT-2 at smoke scale: our loop against a plain one, and all methods.

First a plain single-process PyTorch loop and our loop with one worker take turns in this process,
with the same model, batches, optimizer, schedule and clipping. Then our loop runs with two workers
under every method in turn, several times over.
"""

import argparse
import contextlib
import io
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import report
from co2.comm.mesh import Mesh
from co2.config import Config, Precision
from co2.methods import METHODS
from co2.record.folder import read_summary
from co2.start import placement
from co2.task import Task
from co2.train.schedule import learning_rate
from co2_measure.lab.training import TASK
from train import APP

GOAL = 0.98
BRIEF = [
    *TASK,
    "log.wandb=disabled",
    "checkpoint.every=0",
]
"""A run that trains and does next to nothing else."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5, help="plain loop and ours, in turn")
    parser.add_argument("--rounds", type=int, default=3, help="all methods, in turn")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs:
        common = [*BRIEF, f"train.steps={args.steps}", f"runs={runs}"]
        plain, ours = alone(args.pairs, ["method=co2", *common])
        methods = together(args.rounds, {name: [f"method={name}", *common] for name in METHODS})
    ratios = [b / a for a, b in zip(plain, ours, strict=True)]
    reference = statistics.median(plain)
    rows = [
        ["plain loop", "1", f"{reference:,.0f}", "1"],
        ["ours", "1", f"{statistics.median(ours):,.0f}", spread(ratios)],
    ]
    for name, rates in methods.items():
        against = [rate / base for rate, base in zip(rates, methods["allreduce"], strict=True)]
        rows.append([name, "2", f"{statistics.median(rates):,.0f}", f"{spread(against)} ¹"])
    report.write(
        args.out / "throughput.md",
        "Smoke GPT-2, tokens per second",
        f"Medians over {args.pairs} pairs and {args.rounds} rounds of {args.steps} steps, the "
        f"first step left out. Goal for ours against the plain loop: {GOAL}. Two workers share the "
        "two cores, on the loopback device: nothing here is a slow network.\n\n"
        "¹ against allreduce in the same round.",
        ["loop or method", "workers", "tokens/s, all workers", "ratio, median (min to max)"],
        rows,
    )


def alone(pairs: int, overrides: list[str]) -> tuple[list[float], list[float]]:
    """Units per second of the plain loop and of our loop with one worker, pair by pair."""
    plain, ours = [], []
    for pair in range(pairs):
        config = composed([*overrides, "launch.workers=1", f"tag=pair{pair}"])
        task = APP.make_task(config)
        task.setup(1)
        torch.compiler.reset()  # or the model, compiled before, would count as recompiled
        plain.append(plain_loop(config, task))
        torch.compiler.reset()
        with contextlib.redirect_stdout(io.StringIO()):
            APP.work(config)
        ours.append(throughput(config))
        print(f"pair {pair + 1}/{pairs}: plain {plain[-1]:,.0f}, ours {ours[-1]:,.0f}", flush=True)
    return plain, ours


def together(rounds: int, runs: dict[str, list[str]]) -> dict[str, list[float]]:
    """Units per second of several runs of train.py, given by their overrides, in turn."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name, found in rates.items():
            overrides = [*runs[name], f"tag=round{number}"]
            command = [sys.executable, "train.py", *overrides]
            subprocess.run(command, check=True, stdout=subprocess.PIPE)
            found.append(throughput(composed(overrides)))
            print(f"round {number + 1}/{rounds}: {name} {found[-1]:,.0f}", flush=True)
    return rates


def composed(overrides: list[str]) -> Config:
    """The run that train.py makes of a command line."""
    return APP.config(overrides)


def throughput(config: Config) -> float:
    """Units per second of all workers of a finished run."""
    summary = read_summary(config)
    assert summary is not None
    return summary.throughput


def plain_loop(config: Config, task: Task) -> float:
    """Units per second, the first step left out, of the loop that a person would write."""
    knobs = config.train
    assert knobs.accumulate == 1, "a step is one batch here"
    device, _ = placement.place_of(config, 0, 1)
    half = torch.autocast(device.type, torch.bfloat16, enabled=knobs.precision is Precision.bf16)
    torch.manual_seed(knobs.seed)
    model = task.model().to(device)
    if knobs.compile:
        model.compile()
    optimizer = task.optimizer(model)
    batches = task.batches(Mesh(0, 1, device), 0)
    for step in range(knobs.steps):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * learning_rate(step, config.optim, knobs.steps)
        batch = next(batches)
        assert isinstance(batch, torch.Tensor), "of a language task"
        batch = batch.to(device, non_blocking=True)
        with half:
            loss = task.loss(model, batch)
        loss.backward()
        if knobs.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), knobs.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if step % config.log.every == 0:
            loss.item()
        if step == 0:
            began = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return (knobs.steps - 1) * knobs.batch_size * task.units_per_sample / seconds


def spread(ratios: list[float]) -> str:
    """Median (min to max)."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


if __name__ == "__main__":
    main()
