"""Features larger than memory: what each store of task=graph makes of the same disk.

    sudo .venv/bin/python -m recipes run graph             needs 60 GB of disk

Cost: 45 trainings of half a minute to six minutes on 2 cores, an hour to an hour and a half, and
two minutes to write the graph.
Found (results/tables/graph.md): of the stores that respect the limit, diskgnn is by far the fastest
that keeps the accuracy. With two replicas CO2's is 10 points below AllReduce's after an epoch.

The graph has features of 4 GB; a worker has 1.4 GB of memory for everything, the page cache
included. Seconds of an epoch are those of a step times the steps of an epoch. Before each run the
graph leaves the page cache.
"""

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from co2.record.table import Table
from recipes.recipe import RUNS, Recipe, Row, Rows
from recipes.runs import memory_limit
from recipes.runs.functions import FunctionCell, FunctionColumn
from recipes.tables.entries import by_seed, median_ratio

NODES, FEATURES, CLASSES, DEGREE = 2_000_000, 512, 16, 20
BATCH = 512
"""Of each worker."""
LIMIT_MIB = 1400
"""Of each worker."""
STEPS = {"mmap": 10}
"""Of a timed run; an epoch where a store is not named."""
DATA = Path(RUNS, "graph", "data")
STORES = ("mmap", "ginex", "partition", "diskgnn")
GOALS = (
    "4 for mmap and 2 for the better of the others, at most 1.2 times what is needed read, "
    "less than 10 % of waiting for data"
)
ROWS = (
    *(Row(store, (f"graph.store={store}",)) for store in STORES),
    Row("memory, without a limit", ("graph.store=memory", "limited=false"), limit=True),
)
KINDS = {
    "1 replica": ("launch.workers=1", "method=allreduce"),
    "2 replicas, AllReduce": ("launch.workers=2", "method=allreduce"),
    "2 replicas, CO2": ("launch.workers=2", "method=co2"),
}


def epoch_steps(workers: int) -> int:
    """Steps of an epoch: a tenth of the nodes is trained on."""
    return NODES // 10 // (BATCH * workers)


def train(cells: Sequence[FunctionCell]) -> None:
    """Run train.py for each cell, with less memory than features."""
    from tasks.graph.generated import generate

    memory_limit.check()
    graph = DATA / "graphs" / "generated"
    generate(graph, NODES, FEATURES, CLASSES, DEGREE, seed=0)
    _read_once(graph)
    for cell in cells:
        print(f"  {' '.join(cell.overrides)}", flush=True)
        _trial(cell)


def _read_once(folder: Path) -> None:
    """A virtual disk may fetch from elsewhere what is read for the first time since its start."""
    for path in folder.glob("*.bin"):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def _trial(cell: FunctionCell) -> None:
    settings = cell.settings
    limited = settings.pop("limited", True)
    workers, store = settings["launch.workers"], settings["graph.store"]
    steps = STEPS.get(store, epoch_steps(workers))
    place = cell.folder / "runs"
    words = [
        *(f"{key}={value}" for key, value in settings.items()),
        *("task=graph", "graph.dataset=generated", "graph.fanout=[5,10]", "graph.ahead=1"),
        *(
            f"graph.plan={epoch_steps(workers)}",
            "graph.host_mb=256",
            "graph.parts=32",
            "graph.segment=16",
            "graph.blow_up=5",
        ),
        *(f"train.steps={steps}", f"train.batch_size={BATCH}", f"train.eval_every={steps}"),
        *("optim.warmup_steps=10", "checkpoint.every=0", "log.wandb=disabled"),
        *("graph.eval_samples=4096", f"train.seed={cell.seed}"),
        *(f"data.root={DATA}", f"runs={place}"),
    ]
    graph = DATA / "graphs" / "generated"
    shutil.rmtree(place, ignore_errors=True)  # of a trial that failed
    memory_limit.forget(graph)
    disk = _disk_bytes_s(graph / "features.bin")
    limit = LIMIT_MIB * workers if limited else None
    ended = memory_limit.run([sys.executable, "train.py", *words], limit)
    found = list(place.rglob("summary.json"))
    if ended.returncode or len(found) != 1:
        print(f"  status {ended.returncode}: {ended.stderr[-2000:]}", flush=True)
        return
    summary = json.loads(found[0].read_text())
    step_s = summary["train_s"] / summary["steps"]
    reading = summary.get("reading") or {}
    final = {
        "epoch_s": step_s * epoch_steps(workers),
        "data_percent": 100 * summary["data_share"],
        "accuracy": 100 * summary["final"]["accuracy"],
        "disk_mb_s": disk / 1e6,
    }
    if reading:
        read_s = workers * reading["read_bytes"] / summary["train_s"]
        final["amplification"] = reading["amplification"]
        final["disk_share"] = 100 * read_s / disk
        final["planning_s"] = reading["planning_s"]
        final["plan_gb"] = workers * reading["plan_bytes"] / 1e9
    cell.finish(final, workers, steps)


def _disk_bytes_s(path: Path, pieces: int = 64, piece: int = 1 << 23) -> float:
    """Bytes a second of long direct reads from places that are spread over a file, by 8 threads."""
    from tasks.graph.direct import PAGE, DirectFile, Readers

    file = DirectFile(path, Readers(8))
    firsts = np.linspace(0, file.size - piece, pieces).astype(np.int64) // PAGE
    began = time.perf_counter()
    for first in firsts:
        file.pages(np.array([first]), np.array([first + piece // PAGE]))
    return pieces * piece / (time.perf_counter() - began)


OF_DISK = ("amplification", "disk_share", "planning_s", "plan_gb")
METRICS = (
    ("epoch, s", "epoch_s", True, 1),
    ("waiting for data, %", "data_percent", True, 1),
    ("read / needed", "amplification", True, 2),
    ("share of the disk, %", "disk_share", False, 0),
    ("planning, s", "planning_s", True, 0),
    ("plans, GB", "plan_gb", True, 1),
    ("accuracy, %", "accuracy", False, 1),
)


def _column(kind: str, name: str, metric: str, lower: bool, digits: int = 1) -> FunctionColumn:
    words = KINDS[kind]
    alone = (ROWS[-1].name,) if metric in OF_DISK else ()
    made = partial(FunctionColumn, train=train, curve=False, part=kind, without=alone)
    return made(f"{kind}: {name}", words, f"final.{metric}", lower=lower, digits=digits)


def goals(ours: Rows, _: Rows) -> Iterator[Table]:
    """How much longer epochs are than diskgnn's."""
    values, epoch = by_seed(ours), METRICS[0][0]

    def ratio(row: Row, kind: str) -> str:
        own, base = (values.get((name, f"{kind}: {epoch}"), {}) for name in (row.name, "diskgnn"))
        return median_ratio(own, base)

    if ours:
        yield Table(
            name="graph_ratios",
            title="Seconds of an epoch over diskgnn's",
            text=f"Medians of ratios within a repeat, without planning. Goals: {GOALS}.",
            head=("store", *KINDS),
            rows=[(row.name, *(ratio(row, kind) for kind in KINDS)) for row in ROWS],
        )


RECIPE = Recipe(
    name="graph",
    title="Features larger than memory",
    text=f"GraphSAGE, fanout 5 and 10, batches of {BATCH}, on a generated graph of {NODES:,} nodes "
    f"with {4 * FEATURES * NODES / 1e9:.1f} GB of features; a worker has {LIMIT_MIB} MiB of "
    "memory. Planning is sampling and packing ahead of an epoch, which later runs with the same "
    "batches do not repeat; it is not in the seconds of the epoch. What is needed is what no cache "
    "of the store holds. The share of the disk is of what long direct reads get without training. "
    f"mmap's epoch is reckoned from {STEPS['mmap']} steps, after which its accuracy stands too: a "
    "lower bound, for at first the page cache has room. With two replicas under CO2 an epoch has "
    "few rounds, which costs accuracy with every store. Repeats stand in for seeds. Of 46 "
    "runs one, of diskgnn with two replicas under AllReduce, was killed at the limit of memory and "
    "made again.",
    rows=ROWS,
    columns=tuple(_column(kind, *metric) for kind in KINDS for metric in METRICS),
    scales=("smoke",),
    beside=goals,
    undisturbed=True,
)
