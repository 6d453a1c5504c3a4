"""The published recipes on this GPU: rate, MFU and memory, beside what `co2 plan` has counted.

Every task at scale=paper under CO2 with one worker: the recipe's model, micro-batch, augmentation,
precision and compilation, on generated samples in the layout of the published data. A step is one
micro-batch, as on the most workers that the recipe's batch divides among.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from co2.app.plan import Planner
from co2.errors import ConfigError
from co2.record.files import whole_lines
from recipes.rehearse import data
from recipes.rehearse.__main__ import REHEARSALS
from train import APP

EVERY, INTERVALS = 4, 4
"""Steps between two lines of metrics, and lines. The first line, with the compilation, is left
out."""
COMMON = (
    "scale=paper",
    "method=co2",
    f"co2.tau={EVERY}",
    "launch.workers=1",
    f"train.steps={EVERY * INTERVALS}",
    f"log.every={EVERY}",
    "log.wandb=disabled",
    "train.eval_every=1000000",
    "checkpoint.every=0",
    "mesh.replica_size=1",
    "mesh.strategy=ddp",
)
FITTING = {"transnormer": ("transnormer.size=1b",)}
"""What a recipe needs to fit on one GPU."""
HEAD = (
    "task",
    "parameters, M",
    "micro-batch",
    "samples/s",
    "MFU",
    "waiting for data",
    "peak, GiB",
    "counted, GiB",
    "seconds",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(REHEARSALS), help="some of them")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of every run")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for task in args.tasks.split(","):
            rows.append(measured(task, Path(folder), args.set))
            print("   ".join(rows[-1]), flush=True)
    report.write(
        args.out / "published_gpu.md",
        "The published recipes on one GPU, under CO2",
        f"Medians of {INTERVALS - 1} times {EVERY} steps after {EVERY} others, micro-batch by "
        "micro-batch, on generated samples. Memory is the most that PyTorch's allocator held; "
        "counted is what `co2 plan` says, before compilation. "
        + " ".join(f"{task}: {' '.join(words)}." for task, words in FITTING.items()),
        HEAD,
        rows,
    )


def measured(task: str, folder: Path, given: Sequence[str]) -> list[str]:
    """A line of the table."""
    for name in REHEARSALS[task].sets:
        data.make(name, folder)
    samples = [word for word in REHEARSALS[task].words if "_samples=" in word]
    words = [f"task={task}", *COMMON, f"data.root={folder}", *samples, *FITTING.get(task, ())]
    words += [f"runs={folder / 'runs'}", "resume=never", *given]
    batch = APP.config([*words, "train.global_batch=null"]).train.batch_size
    words.append(f"train.global_batch={batch}")
    done = subprocess.run(
        [sys.executable, "train.py", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        said = done.stdout.decode().strip().splitlines() or ["it said nothing"]
        return [task, *[""] * (len(HEAD) - 2), f"failed: {said[-1]}"]
    (path,) = (folder / "runs" / task).glob("**/summary.json")
    summary: dict[str, Any] = json.loads(path.read_text())
    lines = [line for line in whole_lines(path.parent / "metrics.jsonl") if line["kind"] == "train"]
    steady = lines[1:]

    def median(key: str) -> float | None:
        found = [line[key] for line in steady if line.get(key) is not None]
        return statistics.median(found) if found else None

    rate, mfu, waiting = (median(k) for k in (f"{summary['unit']}_per_s", "mfu", "data_share"))
    return [
        task,
        f"{summary['memory']['parameter_bytes'] / 4e6:,.0f}",
        f"{batch:,}",
        "" if rate is None else f"{rate:,.0f} {summary['unit']}",
        "" if mfu is None else f"{mfu:.1%}",
        "" if waiting is None else f"{waiting:.1%}",
        f"{summary['peak_memory_bytes'] / 2**30:.1f}",
        counted(words),
        f"{summary['train_s']:.0f}",
    ]


def counted(words: Sequence[str]) -> str:
    """GiB that `co2 plan` counts for this run; a dash where it depends on the data."""
    planner = Planner(APP.config, APP.make_task, words, usable=2**60)
    try:
        return f"{planner.need(planner.config(1), 1).num_bytes / 2**30:.1f}"
    except ConfigError:
        return "—"


if __name__ == "__main__":
    main()
