"""Losses of every task's true model, against which a later version is held.

    python -m recipes.rehearse.golden [task=NAME]      compare with results/golden.json
    python -m recipes.rehearse.golden write            train anew and write that file

Each published recipe trains 20 steps of two samples in fp32, on one worker, on the data of a
rehearsal. A change of model, data, augmentation or optimizer shows at once; whether the losses are
good, nothing here tells. Some twenty minutes on two cores.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from co2 import program
from co2.record.provenance import cpu_name
from recipes.rehearse import data
from recipes.rehearse.__main__ import REHEARSALS, Implausible, command, losses, trained

FILE = Path("results/golden.json")
STEPS = 20
SETTINGS = (
    f"train.steps={STEPS}",
    f"train.eval_every={STEPS}",
    "checkpoint.every=0",
    "launch.workers=1",
    "train.batch_size=2",
    "train.global_batch=2",
    "train.precision=fp32",
    "optim.warmup_steps=5",
    "mesh.replica_size=1",
    "mesh.strategy=ddp",
)
SHORT = {"gpt2": 256, "moe": 256, "transnormer": 256}
"""Tokens of a window, where a published one takes minutes a step."""
SAME, OTHER = 1e-4, 2e-2
"""How much a loss may differ on the same kind of processor and on another, relatively."""


def found(task: str, folder: Path) -> list[float]:
    """The losses of a task's steps. Raises `Implausible` where training fails."""
    for name in REHEARSALS[task].sets:
        data.make(name, folder / "data")
    more = [f"{task}.context={SHORT[task]}"] if task in SHORT else []
    words = command(task, "allreduce", folder, [*SETTINGS, *more])
    return losses(trained(words, folder))


def differs(task: str, old: Sequence[float], new: Sequence[float], allowed: float) -> str:
    """What to say where losses differ; "" where they do not."""
    for step, (then, now) in enumerate(zip(old, new, strict=True), 1):
        if not abs(now - then) <= allowed * abs(then):
            return f"{task}: step {step} has loss {now:.6f}, {then:.6f} before"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, or write. Returns 0; 1 where a loss differs; 2 for a wrong word, or a task that the
    file has not."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = [word.removeprefix("task=") for word in words if word.startswith("task=")]
    rest = [word for word in words if not word.startswith("task=")]
    if not set(chosen) <= REHEARSALS.keys() or rest not in ([], ["write"]):
        print(__doc__, file=sys.stderr)
        return 2
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    unknown = [] if rest else [task for task in chosen or REHEARSALS if task not in known]
    if unknown:
        print(f"error: {FILE} has no {unknown[0]}; write it first", file=sys.stderr)
        return 2
    here, status = cpu_name(), 0
    for task in chosen or REHEARSALS:
        with tempfile.TemporaryDirectory(prefix="golden") as folder:
            try:
                new = found(task, Path(folder))
            except Implausible as wrong:
                print(f"{task}: {wrong}", file=sys.stderr)
                status = 1
                continue
        if rest:
            known[task] = {"cpu": here, "losses": [round(loss, 6) for loss in new]}
            FILE.write_text(json.dumps(known, indent=1) + "\n")
            print(f"{task}: {new[0]:.4f} … {new[-1]:.4f}", flush=True)
            continue
        old = known[task]
        line = differs(task, old["losses"], new, SAME if old["cpu"] == here else OTHER)
        print(line or f"{task}: the same", flush=True)
        status |= bool(line)
    return status


if __name__ == "__main__":
    program.run(main)
