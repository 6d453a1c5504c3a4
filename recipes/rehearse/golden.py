"""Golden losses: a change of code that moves them must raise the version of what it has changed.

results/golden.json has three parts. A short training of every method on the toy and one of every
task are compared by tests/recipes/test_golden.py. The third has the losses of every task's true
model, which only this program makes:

    python -m recipes.rehearse.golden [task=NAME]      compare with results/golden.json
    python -m recipes.rehearse.golden write            train anew, and write what has a new version

Each published recipe trains 20 steps of two samples in fp32, on one worker, on the data of a
rehearsal. A change of model, data, augmentation or optimizer shows at once; whether the losses are
good, nothing here tells. Some twenty minutes on two cores.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from co2 import program
from co2.methods import Method
from co2.record.provenance import cpu_name
from co2.task import Task
from recipes.rehearse import data
from recipes.rehearse.__main__ import REHEARSALS, Implausible, command, losses, trained
from tasks import TASKS

FILE = Path(__file__).parents[2] / "results" / "golden.json"
PUBLISHED = "published"
"""The part of the file that this program makes."""
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
SAME, OTHER, FAR = 1e-4, 2e-3, 2e-2
"""How much a loss may differ on the same kind of processor and on another, relatively; and on
another where much follows from the last bits: of DeMo, which sends the largest of many numbers, and
of true models."""


def found(task: str, folder: Path) -> list[float]:
    """The losses of a task's steps. Raises `Implausible` where training fails."""
    for name in REHEARSALS[task].sets:
        data.make(name, folder / "data")
    more = [f"{task}.context={SHORT[task]}"] if task in SHORT else []
    words = command(task, "allreduce", folder, [*SETTINGS, *more])
    return losses(trained(words, folder))


def missing(part: str, name: str, of: type[Task] | type[Method], command: str) -> str:
    """What to say where the file has no losses of this version; "" where it has."""
    entry = _read().get(part, {}).get(name)
    if entry is not None and entry["version"] == of.version:
        return ""
    return f"{FILE.name} has no losses of {name}, version {of.version}; write them: {command}"


def objection(
    part: str, name: str, of: type[Task] | type[Method], losses: Sequence[float], command: str
) -> str:
    """What to say where these losses differ from those in the file; "" where they do not.

    Args:
        part: of the file.
        of: what has the version.
        command: writes what has another version than in the file.
    """
    entry = _read()[part][name]
    allowed = FAR if part == PUBLISHED or name == "demo" else OTHER
    line = differs(entry["losses"], losses, SAME if entry["cpu"] == cpu_name() else allowed)
    higher = f"raise `version` in {of.__module__}.{of.__name__} to {of.version + 1}"
    return line and f"{name}: {line}; if results are to change, {higher}, then: {command}"


def write(part: str, name: str, of: type[Task] | type[Method], losses: Sequence[float]) -> None:
    """Put losses into the file, in place of those of another version."""
    known = _read()
    rounded = [round(loss, 6) for loss in losses]
    entry = {"version": of.version, "cpu": cpu_name(), "losses": rounded}
    known.setdefault(part, {})[name] = entry
    parts = {part: dict(sorted(known[part].items())) for part in sorted(known)}
    FILE.write_text(json.dumps(parts, indent=1) + "\n")


def _read() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def differs(old: Sequence[float], new: Sequence[float], allowed: float) -> str:
    """The first loss that differs; "" where none does."""
    for number, (then, now) in enumerate(zip(old, new, strict=True), 1):
        if not abs(now - then) <= allowed * abs(then):
            return f"loss {number} is {now:.6f}, {then:.6f} before"
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
    writing, status = f"{program.python()} -m recipes.rehearse.golden write", 0
    for task in chosen or REHEARSALS:
        unknown = missing(PUBLISHED, task, TASKS[task], writing)
        if unknown and not rest:
            print(f"error: {unknown}", file=sys.stderr)
            return 2
        with tempfile.TemporaryDirectory(prefix="golden") as folder:
            try:
                new = found(task, Path(folder))
            except Implausible as wrong:
                print(f"{task}: {wrong}", file=sys.stderr)
                status = 1
                continue
        if unknown:
            write(PUBLISHED, task, TASKS[task], new)
        line = objection(PUBLISHED, task, TASKS[task], new, writing)
        print(line or f"{task}: {new[0]:.4f} … {new[-1]:.4f}", flush=True)
        status |= bool(line)
    return status


if __name__ == "__main__":
    program.run(main)
