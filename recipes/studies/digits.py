"""Does the staleness gap matter? CO2 with and without its penalty on scikit-learn's 8×8 digits.

    python -m recipes run digits                           eight workers on this machine

Cost: 56 trainings of ten seconds on 2 cores, all in the same eight processes: nine minutes.
Found (results/tables/digits.md): CO2 without a gap penalty ends far above CO2 with one. That tells
a working penalty from a missing one; it ranks no methods.

The methods run over gloo in the setting of an earlier single-process simulation: 1,400 training
and 397 test images, 10 % of the training labels replaced at random, an MLP 64-64-64-10, batches of
16 on each of 8 replicas, τ = 12, a cosine schedule with 40 warm-up steps; SGD (lr 0.1, momentum
0.9) with β = 0.2, and Adam (lr 3e-3) with β = 0.5. The figures are those of the replicas' consensus
on the test images.

The setting left open, and this file chooses: pixels scaled to [0, 1]; ReLU; PyTorch's initial
weights; no weight decay; one random split for all seeds, while replaced labels, initial weights and
order differ by seed. Every epoch shuffles all images. At each step replica i takes the i-th 16 of
the next 16·G images; the rest of an epoch is dropped. A replaced label may happen to be the right
one. SlowMo has CO2's β and was not tuned.
"""

import gc
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import co2
from co2.config import OptimConfig
from co2.record.table import NOTHING, Table
from co2.train.schedule import learning_rate
from recipes.recipe import Recipe, Row, Rows
from recipes.runs.functions import FunctionCell, FunctionColumn

NUM_TRAIN, BATCH_SIZE, WARMUP_STEPS = 1400, 16, 40
SETTING = ("replicas=8", "steps=960", "tau=12")
OUTER_MOMENTUM = {"sgd": 0.2, "adam": 0.5}
"""β of CO2 and SlowMo by the inner optimizer."""
NONE, GAP_AWARE = "CO2 without gap penalty", "CO2"
SIMULATION = {
    ("sgd", NONE): "1.5 ± 0.6",
    ("sgd", GAP_AWARE): "0.22 ± 0.01",
    ("sgd", "AllReduce"): "0.21 ± 0.02",
    ("sgd", "Local SGD"): "0.20 ± 0.01",
    ("adam", NONE): "0.56 ± 0.09",
    ("adam", GAP_AWARE): "0.28 ± 0.01",
    ("adam", "AllReduce"): "0.25",
    ("adam", "Local SGD"): "0.26",
}
"""Test cross-entropy that the simulation found with 8 replicas, 960 steps and 4 seeds."""


def mean_text(values: Sequence[float], form: str) -> str:
    """Mean ± standard deviation of a sample, both of this format; the mean alone for one value."""
    spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{spread}"


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


def method_of(cell: FunctionCell) -> tuple[str, dict[str, Any]]:
    """Name and configuration fields of a cell's method. Any: the fields have types of their own."""
    fields = cell.settings
    optimizer, name = fields.pop("optimizer"), fields.pop("method")
    del fields["replicas"], fields["steps"]
    if name == "allreduce":
        del fields["tau"]
    if name in ("co2", "slowmo"):
        fields["outer_momentum"] = OUTER_MOMENTUM[optimizer]
    return name, fields


def train(cell: FunctionCell) -> dict[str, float]:
    """Train one model with the workers of the process group. Returns its test figures."""
    mesh, steps = co2.Mesh.world(), cell.settings["steps"]
    images, labels = digits(cell.seed)
    order = batch_order(cell.seed, steps, mesh.num_replicas)[:, mesh.replica]
    torch.manual_seed(cell.seed)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    if cell.settings["optimizer"] == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    peak, schedule = optimizer.param_groups[0]["lr"], OptimConfig(warmup_steps=WARMUP_STEPS)

    name, fields = method_of(cell)
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


def train_all(cells: Sequence[FunctionCell]) -> None:
    """Train these cells one after the other, in processes that start once."""
    for replicas in dict.fromkeys(cell.settings["replicas"] for cell in cells):
        same = [cell for cell in cells if cell.settings["replicas"] == replicas]
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_work, (replicas, same, folder), nprocs=replicas)


def _work(rank: int, replicas: int, cells: Sequence[FunctionCell], folder: str) -> None:
    """Train every cell in a process group of its own; each worker calls this."""
    torch.set_num_threads(1)
    for index, cell in enumerate(cells):
        store = dist.FileStore(f"{folder}/store{index}", replicas)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=replicas)
        final = train(cell)
        gc.collect()  # DDP's reducer is part of a cycle and must not outlive its group
        dist.destroy_process_group()
        if rank == 0:
            cell.finish(final, replicas, cell.settings["steps"])
            print(
                f"{index + 1} of {len(cells)}: {' '.join(cell.overrides)}, seed {cell.seed}: "
                f"cross-entropy {final['cross_entropy']:.3f}, accuracy {final['accuracy']:.3f}",
                flush=True,
            )


def verdicts(ours: Rows, _: Rows) -> Iterator[Table]:
    """Whether the penalty lowers the cross-entropy by more than both deviations together, and what
    the simulation found.
    """
    lines = []
    for optimizer in OUTER_MOMENTUM:
        without, aware = (_losses(ours, optimizer, name) for name in (NONE, GAP_AWARE))
        if len(without) > 1 and len(aware) > 1:
            distance = statistics.mean(without) - statistics.mean(aware)
            deviations = statistics.stdev(without) + statistics.stdev(aware)
            effect = "yes" if distance > deviations else "no"
            lines.append((optimizer, f"{distance:.3f}", f"{deviations:.3f}", effect))
    if lines:
        yield Table(
            name="digits_effect",
            title="Digits: does the effect show?",
            text="How far the mean test cross-entropy without the gap penalty lies above that with "
            "it, and the sum of their standard deviations.",
            head=("optimizer", "without − with", "both deviations", "effect shows"),
            rows=lines,
        )
    simulated = []
    for optimizer in OUTER_MOMENTUM:
        for row in RECIPE.rows:
            own = _losses(ours, optimizer, row.name)
            if own:
                words = SIMULATION.get((optimizer, row.name), NOTHING)
                simulated.append((optimizer, row.name, mean_text(own, ".3f"), words))
    if simulated:
        yield Table(
            name="digits_simulation",
            title="Digits: beside the single-process simulation",
            text="Test cross-entropy, mean ± standard deviation over four seeds of either.",
            head=("optimizer", "method", "measured here", "simulation"),
            rows=simulated,
        )


def _losses(ours: Rows, optimizer: str, name: str) -> list[float]:
    """The seeds' cross-entropies of a row."""
    place = (name, f"{optimizer}, cross-entropy")
    return [float(line["value"]) for line in ours if (line["row"], line["column"]) == place]


column = partial(FunctionColumn, train=train_all, digits=3, curve=False)
"""A column of these trainings."""

RECIPE = Recipe(
    name="digits",
    title="Digits: the staleness gap",
    text="Consensus of 8 replicas after 960 steps, on 397 test images; the setting stands at the "
    "head of this recipe.",
    rows=(
        Row("AllReduce", ("method=allreduce",)),
        Row("Local SGD", ("method=local_sgd",)),
        Row("SlowMo", ("method=slowmo",)),
        Row(GAP_AWARE, ("method=co2", "gap_penalty=gap_aware")),
        Row(NONE, ("method=co2", "gap_penalty=none")),
        Row("CO2, gap penalty by element", ("method=co2", "gap_penalty=gap_aware_elementwise")),
        Row("CO2, constant gap 2", ("method=co2", "gap_penalty=2.0")),
    ),
    columns=tuple(
        made
        for optimizer in OUTER_MOMENTUM
        for made in (
            column(
                f"{optimizer}, cross-entropy",
                (f"optimizer={optimizer}", *SETTING),
                "final.cross_entropy",
                lower=True,
            ),
            column(
                f"{optimizer}, accuracy, %",
                (f"optimizer={optimizer}", *SETTING),
                "final.accuracy",
                factor=100,
                digits=1,
            ),
        )
    ),
    seeds=(0, 1, 2, 3),
    scales=("smoke",),
    beside=verdicts,
)
