"""Does the staleness gap matter? CO2 with and without it on scikit-learn's 8×8 digits.

The real methods, over gloo, in the setting that a single-process simulation was run in: 1,400
training and 397 test images, 10 % of the training labels replaced at random, an MLP 64-64-64-10,
batch 16 on every replica, τ = 12, cosine with 40 warm-up steps; SGD (lr .1, momentum .9) with
β = .2 and Adam (lr 3e-3) with β = .5. Measured is the replicas' consensus on the test images.
Smoke-scale: it tells a working gap penalty from a missing one, and ranks no methods.

Chosen here, where the setting leaves it open: pixels scaled to [0, 1]; ReLU; PyTorch's initial
weights; no weight decay; one random split for all seeds, while replaced labels, initial weights
and order are drawn anew for every seed; every epoch shuffles all images, and step by step replica
i takes the i-th 16 of the next 16·G; what is left of an epoch is dropped; a replaced label may by
chance be the right one. SlowMo has CO2's β and was not tuned.
"""

import argparse
import csv
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import co2
from benchmarks import report
from co2.config import OptimConfig
from co2.train.loop import learning_rate

NUM_TRAIN, BATCH_SIZE, TAU, WARMUP_STEPS = 1400, 16, 12, 40
OUTER_MOMENTUM = {"sgd": 0.2, "adam": 0.5}

# Row of the table → method, and the fields that set it apart.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "co2, gap_penalty=none": ("co2", {"gap_penalty": "none"}),
    "co2, gap_penalty=gap_aware": ("co2", {"gap_penalty": "gap_aware"}),
    "co2, gap_penalty=gap_aware_elementwise": ("co2", {"gap_penalty": "gap_aware_elementwise"}),
    "co2, gap_penalty=2": ("co2", {"gap_penalty": 2.0}),
    "allreduce": ("allreduce", {}),
    "local_sgd": ("local_sgd", {}),
    "slowmo": ("slowmo", {}),
}
NONE, GAP_AWARE = "co2, gap_penalty=none", "co2, gap_penalty=gap_aware"

# Test cross-entropy that the simulation found with 8 replicas, 960 steps and 4 seeds.
SIMULATION = {
    ("sgd", NONE): "1.5 ± 0.6",
    ("sgd", GAP_AWARE): "0.22 ± 0.01",
    ("sgd", "allreduce"): "0.21 ± 0.02",
    ("sgd", "local_sgd"): "0.20 ± 0.01",
    ("adam", NONE): "0.56 ± 0.09",
    ("adam", GAP_AWARE): "0.28 ± 0.01",
    ("adam", "allreduce"): "0.25",
    ("adam", "local_sgd"): "0.26",
}

HEAD = ["optimizer", "method", "seeds", "test cross-entropy, measured here"]
HEAD += ["single-process simulation", "test accuracy, measured here"]


class Run(NamedTuple):
    optimizer: str
    method: str
    seed: int


def digits(seed: int) -> tuple[Tensor, Tensor]:
    """Images (1797, 64) in [0, 1] and labels; the first 1,400 are for training, with noise."""
    raw = load_digits()
    images = torch.tensor(raw.data / 16, dtype=torch.float32)
    labels = torch.tensor(raw.target, dtype=torch.long)
    split = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[split], labels[split]
    draw = torch.Generator().manual_seed(2000 + seed)
    noisy = torch.randperm(NUM_TRAIN, generator=draw)[: NUM_TRAIN // 10]
    labels[noisy] = torch.randint(10, noisy.shape, generator=draw)
    return images, labels


def batch_order(seed: int, steps: int, replicas: int) -> Tensor:
    """Indices (steps, replicas, 16) into the training images."""
    draw = torch.Generator().manual_seed(1000 + seed)
    per_epoch = NUM_TRAIN // (replicas * BATCH_SIZE)
    used = per_epoch * replicas * BATCH_SIZE
    epochs = math.ceil(steps / per_epoch)
    order = torch.cat([torch.randperm(NUM_TRAIN, generator=draw)[:used] for _ in range(epochs)])
    return order.view(-1, replicas, BATCH_SIZE)[:steps]


def train(run: Run, steps: int) -> dict[str, float]:
    """Train one model with the workers of the process group; test figures of the consensus."""
    mesh = co2.Mesh.world()
    images, labels = digits(run.seed)
    order = batch_order(run.seed, steps, mesh.num_replicas)[:, mesh.replica]
    torch.manual_seed(run.seed)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    if run.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    peak, schedule = optimizer.param_groups[0]["lr"], OptimConfig(warmup_steps=WARMUP_STEPS)

    name, fields = METHODS[run.method]
    if name != "allreduce":
        fields = {"tau": TAU, **fields}
    if name in ("co2", "slowmo"):
        fields = {"outer_momentum": OUTER_MOMENTUM[run.optimizer], **fields}
    sync = co2.METHODS[name](co2.METHODS[name].Config(**fields))
    replica = sync.prepare(model, optimizer, mesh)
    for step, batch in enumerate(order):
        optimizer.param_groups[0]["lr"] = peak * learning_rate(step, schedule, steps)
        cross_entropy(replica(images[batch]), labels[batch]).backward()
        sync.step()
        optimizer.zero_grad()
    with sync.consensus(), torch.no_grad():
        logits = model(images[NUM_TRAIN:])
        loss = cross_entropy(logits, labels[NUM_TRAIN:]).item()
        accuracy = (logits.argmax(1) == labels[NUM_TRAIN:]).float().mean().item()
    sync.flush()
    return {"cross_entropy": loss, "accuracy": accuracy}


def work(rank: int, replicas: int, runs: list[Run], steps: int, folder: str) -> None:
    """One worker's life: all runs, each in a process group of its own."""
    torch.set_num_threads(1)
    figures = []
    for index, run in enumerate(runs):
        began = time.perf_counter()
        store = dist.FileStore(f"{folder}/store{index}", replicas)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=replicas)
        figures.append(train(run, steps))
        gc.collect()  # DDP's reducer sits in a cycle and must not outlive its group
        dist.destroy_process_group()
        if rank == 0:
            loss, accuracy = figures[-1].values()
            took = time.perf_counter() - began
            print(
                f"[{index + 1}/{len(runs)}] {run.optimizer}, seed {run.seed}, {run.method}: "
                f"cross-entropy {loss:.3f}, accuracy {accuracy:.3f}, {took:.1f} s",
                flush=True,
            )
    if rank == 0:
        Path(folder, "figures.json").write_text(json.dumps(figures))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--optimizers", default="sgd,adam")
    parser.add_argument("--steps", type=int, default=960)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    optimizers = args.optimizers.split(",")
    if args.seeds < 2 or args.steps < 1 or not 1 <= args.replicas <= NUM_TRAIN // BATCH_SIZE:
        parser.error("needs 2 seeds, for a deviation, 1 step, and 1 to 87 replicas")
    if not set(optimizers) <= set(OUTER_MOMENTUM):
        parser.error(f"--optimizers takes {', '.join(OUTER_MOMENTUM)}, not {args.optimizers}")

    runs = [Run(o, m, s) for o in optimizers for s in range(args.seeds) for m in METHODS]
    with tempfile.TemporaryDirectory() as folder:
        workers = (args.replicas, runs, args.steps, folder)
        torch.multiprocessing.spawn(work, workers, nprocs=args.replicas)
        found = json.loads(Path(folder, "figures.json").read_text())
    figures = dict(zip(runs, found, strict=True))
    same_setting = (args.replicas, args.steps) == (8, 960)
    records, rows = [], []
    for optimizer in optimizers:
        for method in METHODS:
            record = {"optimizer": optimizer, "method": method, "seeds": args.seeds}
            record |= {"replicas": args.replicas, "steps": args.steps}
            for key in ("cross_entropy", "accuracy"):
                values = [figures[Run(optimizer, method, s)][key] for s in range(args.seeds)]
                record[f"{key}_mean"] = round(statistics.mean(values), 5)
                record[f"{key}_std"] = round(statistics.stdev(values), 5)
            simulation = SIMULATION.get((optimizer, method)) if same_setting else None
            records.append({**record, "single_process_simulation": simulation})
            loss = f"{record['cross_entropy_mean']:.3f} ± {record['cross_entropy_std']:.3f}"
            accuracy = f"{record['accuracy_mean']:.3f} ± {record['accuracy_std']:.3f}"
            rows.append((optimizer, method, str(args.seeds), loss, simulation or "–", accuracy))

    verdicts = [verdict(optimizer, records) for optimizer in optimizers]
    conclusion = "\n".join(f"- {sentence}" for _, sentence in verdicts)
    report.write(
        args.out / "digits.md",
        "Digits: what the staleness gap does",
        f"{__doc__}\n{args.replicas} replicas, {args.steps} steps; mean ± standard deviation over "
        f"the seeds. Does the effect show?\n\n{conclusion}",
        HEAD,
        rows,
    )
    with (args.out / "digits.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, records[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    print(conclusion)
    return 0 if all(shows for shows, _ in verdicts) else 1


def verdict(optimizer: str, records: list[dict[str, Any]]) -> tuple[bool, str]:
    """Whether the two means lie further apart than both deviations together, and a sentence."""
    of = {r["method"]: r for r in records if r["optimizer"] == optimizer}
    without, aware = of[NONE], of[GAP_AWARE]
    distance = without["cross_entropy_mean"] - aware["cross_entropy_mean"]
    deviations = without["cross_entropy_std"] + aware["cross_entropy_std"]
    shows = distance > deviations
    return shows, (
        f"{optimizer}: {'yes' if shows else 'NO'}. `none` lies {distance:.3f} above `gap_aware`; "
        f"the two deviations add up to {deviations:.3f}."
    )


if __name__ == "__main__":
    sys.exit(main())
