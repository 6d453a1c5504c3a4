"""Proof that a change of the code changes no number: loss histories of every method, bit for bit.

    python -m tests.loss_recorder record before.json           in a checkout of the old code
    python -m tests.loss_recorder record after.json            in a checkout of the new code
    python -m tests.loss_recorder compare before.json after.json

A case is a short run of train.py in the current folder. Of each the recorder keeps the fp32 bits of
the training loss at every step, every evaluation, and a digest of the final weights. Bits depend on
the processor and on the version of torch, so both recordings must be made on one machine. Cases
that the file holds already are kept, so that an interrupted recording goes on.
"""

import argparse
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WITH_ROUNDS = (
    *("local_sgd", "slowmo", "diloco", "overlap_local_sgd", "cocod_sgd", "streaming_diloco"),
    *("eager_diloco", "sparseloco", "noloco", "co2", "co2_released"),
)
KEEP = ("method=co2_keep", "co2_keep.tau=6", "co2_keep.momentum_weight=0")
OWN: dict[str, tuple[str, ...]] = {
    "allreduce": (),
    **dict.fromkeys(WITH_ROUNDS, ("tau=3",)),
    "co2_keep": ("tau=3", "fragments=1", "momentum_weight=0"),
    "acco": (),
    "sparta": (),
    "desloc": ("tau=3", "first_moment_every=4", "second_moment_every=5"),
    "mt_dao": ("tau=3", "first_moment_every=6", "second_moment_every=5", "late_momentum=true"),
    "demo": (),
    "onebit_adam": ("freeze_step=6",),
    "zero_one_adam": ("freeze_step=6", "double_every=4"),
}
"""Overrides of every method's own node: rounds so short that many of them pass."""
WORKERS = (1, 2, 3)
LENGTH = {"toy": 40, "gpt2": 20}
"""Steps of the two tasks that are trained under every method."""
SMALL = {
    "toy": (),
    **{
        task: (f"{task}.context=32", "train.batch_size=2", f"{task}.eval_samples=8")
        for task in ("gpt2", "moe", "transnormer", "roberta")
    },
    "glue": ("glue.name=adjoin", "train.batch_size=2", "glue.eval_samples=8"),
    "resnet50": ("train.batch_size=8",),
    "vit": ("train.batch_size=8",),
    "ade20k": ("train.batch_size=2",),
    "shapenet": ("train.batch_size=4",),
}
CO2 = ("method=co2", "co2.tau=3")
MORE = (
    ("toy", 2, (*CO2, "co2.shard=true")),
    ("toy", 3, (*CO2, "co2.shard=true", "co2.clip=0.01")),
    ("toy", 2, (*CO2, "co2.clip=0.01", "comm.dtype=bf16")),
    ("toy", 2, (*CO2, "co2.gap_penalty=gap_aware_elementwise")),
    ("toy", 2, (*CO2, "co2.clip=0.1", "co2.clip_mode=norm")),
    ("toy", 2, ("method=allreduce", "comm.dtype=bf16", "train.accumulate=2")),
    ("toy", 2, (*KEEP, "co2_keep.fragments=1", "co2_keep.delay=2")),
    ("toy", 2, (*KEEP, "co2_keep.fragments=3")),
    ("toy", 2, ("method=streaming_diloco", "streaming_diloco.exchange=int8")),
    ("toy", 4, (*CO2, "mesh.replica_size=2", "mesh.strategy=zero1")),
    ("toy", 4, (*CO2, "mesh.replica_size=2", "mesh.strategy=zero3")),
)
"""Task, workers and overrides of options that the plain cases leave out."""


def cases() -> Iterator[tuple[str, list[str]]]:
    """Name and overrides of every case."""
    for task in ("toy", "gpt2"):
        for method, own in OWN.items():
            for workers in WORKERS:
                settings = [f"method={method}", *(f"{method}.{word}" for word in own)]
                yield f"{task} {method} {workers}", overrides(task, workers, settings)
    for task in SMALL:
        if task not in LENGTH:
            settings = ["method=co2", "co2.tau=3"]
            yield f"{task} co2 2", overrides(task, 2, settings)
    for task, workers, words in MORE:
        yield f"{task} {workers} {' '.join(words)}", overrides(task, workers, words)


def overrides(task: str, workers: int, settings: Sequence[str]) -> list[str]:
    steps = LENGTH.get(task, 10)
    names = [f"method={name}" for name in ("desloc", "mt_dao", "onebit_adam", "zero_one_adam")]
    adam = task == "toy" and settings[0] in names
    return [
        f"task={task}",
        f"launch.workers={workers}",
        f"train.steps={steps}",
        f"train.eval_every={steps // 2}",
        "checkpoint.every=0",
        "log.every=1",
        "log.wandb=disabled",
        "launch.backend=gloo",
        *(("optim.name=adamw", "optim.lr=1e-3") if adam else ()),
        *SMALL[task],
        *settings,
    ]


def recorded(words: Sequence[str]) -> dict[str, Any]:
    """Train one case and read what it has left behind."""
    with tempfile.TemporaryDirectory() as runs:
        call = [sys.executable, "train.py", *words, f"runs={runs}", "tag=recorded"]
        ended = subprocess.run(call, capture_output=True, text=True, env=environment())
        if ended.returncode:
            raise SystemExit(f"{' '.join(words)}\n{ended.stdout}{ended.stderr}")
        (summary,) = Path(runs).glob("*/*/recorded/seed*/summary.json")
        lines = (summary.parent / "metrics.jsonl").read_text().splitlines()
        weights = summary.parent / "model.pt"
        return {
            "losses": [bits(line["loss"]) for line in map(json.loads, lines) if is_train(line)],
            "evaluations": [scores(line) for line in map(json.loads, lines) if not is_train(line)],
            "weights": digest(weights),
        }


def is_train(line: dict[str, Any]) -> bool:
    return line["kind"] == "train"


def scores(line: dict[str, Any]) -> dict[str, str]:
    timed = ("kind", "train_s", "text")
    return {key: str(value) for key, value in line.items() if key not in timed}


def bits(loss: float) -> str:
    """The fp32 number as eight hexadecimal digits."""
    return struct.pack(">f", loss).hex()


def digest(path: Path) -> str:
    """Of the weights in a state dict, in its order."""
    import torch

    total = hashlib.sha256()
    for name, value in torch.load(path, map_location="cpu", weights_only=True).items():
        total.update(name.encode())
        total.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def environment() -> dict[str, str]:
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {key: value for key, value in os.environ.items() if key not in launched}


def record(path: Path) -> None:
    """Every case that the file does not hold yet."""
    found = json.loads(path.read_text()) if path.exists() else {}
    for name, words in cases():
        if name not in found:
            found[name] = recorded(words)
            path.write_text(json.dumps(found, indent=1))
            print(f"{len(found)}: {name}", flush=True)


def compare(before: Path, after: Path) -> int:
    """Returns 0 where both files hold the same cases with the same bits."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    differ = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    steps = sum(len(case["losses"]) for case in old.values())
    print(f"{len(old)} cases, {steps} steps; {len(differ)} cases differ")
    for name in differ:
        print(f"  {name}: {difference(old.get(name), new.get(name))}")
    return 1 if differ or not old else 0


def difference(old: dict[str, Any] | None, new: dict[str, Any] | None) -> str:
    if old is None or new is None:
        return "is in one recording only"
    for step, pair in enumerate(zip(old["losses"], new["losses"], strict=False), start=1):
        if pair[0] != pair[1]:
            return f"the loss differs from step {step} on"
    return ", ".join(key for key in old if old[key] != new.get(key))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.loss_recorder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("record").add_argument("path", type=Path)
    both = actions.add_parser("compare")
    both.add_argument("before", type=Path)
    both.add_argument("after", type=Path)
    options = parser.parse_args(argv)
    if options.action == "compare":
        return compare(options.before, options.after)
    record(options.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
