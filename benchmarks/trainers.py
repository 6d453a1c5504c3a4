"""transformers' Trainer on slow links: with DistributedDataParallel, and under CO2.

    sudo .venv/bin/python -m benchmarks.trainers --mbit 20,100

Two processes fine-tune a GPT-2 of transformers as its language-modelling example does: texts in one
row, cut into blocks of equal length, under Trainer. Each has a network namespace with a link of the
laboratory's, and a core of its own. SyncTrainer with a round longer than the training never
communicates: it is the limit. The trainings of a repeat follow one another, and ratios are taken
within a repeat.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import co2
from benchmarks import report
from co2.integrations.transformers import SyncTrainer
from co2_measure.lab.slow_network import SlowNetwork, check_root
from tasks.shared.corpus import embedded_corpus

WORKERS, BATCH, LENGTH = 2, 8, 128
SHAPE = GPT2Config(
    n_embd=128,
    n_layer=6,
    n_head=4,
    n_positions=LENGTH,
    vocab_size=256,
    bos_token_id=0,
    eos_token_id=0,
)
NEVER = 10**9
TRAINERS: dict[str, Callable[[int], co2.Method | None]] = {
    "Trainer with DDP": lambda tau: None,
    "SyncTrainer, AllReduce": lambda tau: co2.AllReduce(co2.AllReduce.Config()),
    "SyncTrainer, Local SGD": lambda tau: co2.LocalSGD(co2.LocalSGD.Config(tau=tau)),
    "SyncTrainer, CO2": lambda tau: co2.CO2(co2.CO2.Config(tau=tau)),
    "no communication": lambda tau: co2.LocalSGD(co2.LocalSGD.Config(tau=NEVER)),
}
LIMIT = "no communication"
STEPWISE = ("Trainer with DDP", "SyncTrainer, AllReduce")
"""They are alike at every step, so that few are enough."""


class Clock(TrainerCallback):
    """Seconds from the end of step `first` to the end of training's last step."""

    def __init__(self, first: int) -> None:
        self.first, self.began, self.seconds = first, 0.0, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.first:
            self.began = time.perf_counter()
        self.seconds = time.perf_counter() - self.began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", default="20,100", help="rates of the links")
    parser.add_argument("--tau", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=4, help="of τ steps; one more comes first")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(train(args.worker, args.tau, args.rounds)), flush=True)
        return
    check_root()
    rates = args.mbit.split(",")
    found: dict[tuple[str, str], list[float]] = {}
    for repeat in range(args.repeats):
        for mbit in rates:
            for name in TRAINERS:
                rate = measured(name, float(mbit), args.tau, args.rounds)
                found.setdefault((name, mbit), []).append(rate)
                print(f"repeat {repeat + 1}: {mbit} Mbit/s, {name}: {rate:,.0f} tokens/s")
    rows = [[name, *(cell(found, name, mbit) for mbit in rates)] for name in TRAINERS]
    parameters = sum(parameter.numel() for parameter in model().parameters())
    report.write(
        args.out / "trainers_cpu.md",
        "transformers' Trainer on slow links",
        f"Tokens per second of two processes together, and their share of the training without "
        f"communication in the same repeat: medians over {args.repeats} repeats. GPT-2 with "
        f"{parameters / 1e6:.1f} M parameters, {BATCH} rows of {LENGTH} bytes a step, τ = "
        f"{args.tau}; {args.rounds} rounds, of the first two {args.rounds} steps. The first round "
        "(or two steps) is left out.",
        ["trainer", *(f"{mbit} Mbit/s" for mbit in rates)],
        rows,
    )


def cell(found: dict[tuple[str, str], list[float]], name: str, mbit: str) -> str:
    """Median throughput and median share of the limit."""
    pairs = zip(found[name, mbit], found[LIMIT, mbit], strict=True)
    share = statistics.median(rate / limit for rate, limit in pairs)
    return f"{statistics.median(found[name, mbit]):,.0f} ({share:.1%})"


def measured(name: str, mbit: float, tau: int, rounds: int) -> float:
    """Tokens per second of both workers of one training; raises if one of them fails."""
    cores = sorted(os.sched_getaffinity(0))
    own = [{core} for core in cores[:WORKERS]] if len(cores) >= WORKERS else []
    command = [sys.executable, "-m", "benchmarks.trainers", "--worker", name]
    command += ["--tau", str(tau), "--rounds", str(rounds)]
    with SlowNetwork([mbit] * WORKERS, cores=own) as network:
        workers = []
        for rank in range(WORKERS):
            told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORKERS)}
            told |= {"MASTER_ADDR": network.address(0), "MASTER_PORT": "29500"}
            told |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            workers.append(network.start(rank, command, {**os.environ, **told}))
        outputs = [worker.communicate()[0] for worker in workers]
    for worker, output in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, output
    return WORKERS * min(float(output.splitlines()[-1]) for output in outputs)


def train(name: str, tau: int, rounds: int) -> float:
    """Tokens per second of this process."""
    transformers.utils.logging.disable_progress_bar()
    sync = TRAINERS[name](tau)
    first, steps = (2, 2 + rounds) if name in STEPWISE else (tau, tau * (1 + rounds))
    clock = Clock(first)
    settings = TrainingArguments(
        "/tmp/trainers",
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=3e-3,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo",
    )
    kind = partial(SyncTrainer, sync=sync) if sync else Trainer
    trainer = kind(model(), settings, train_dataset=blocks(), callbacks=[clock])
    trainer.train()
    return (steps - first) * BATCH * LENGTH / clock.seconds


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(SHAPE)


def blocks() -> list[dict[str, torch.Tensor]]:
    """sympy's source text, byte by byte."""
    text = "".join(islice(embedded_corpus("text").documents("train"), 50)).encode()
    rows = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


if __name__ == "__main__":
    main()
