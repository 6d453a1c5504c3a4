"""A dress rehearsal of the published recipes on this machine, before anybody pays for them.

    python -m recipes.rehearse [task=NAME] [method=NAME] [KEY=VALUE ...]

Every task at scale=paper under allreduce, slowmo and co2: its true model, sample shapes,
augmentation and mesh, on a few generated samples in the layout of the published data. A rehearsal
trains three steps, evaluates and saves after the second, makes the third once more from that
checkpoint, and fails where a loss is not plausible or the third step is not the same, bit for bit.
What differs from the recipe: few samples in a batch, rounds of one step, no compilation (give
train.compile=true), and of the largest models only the first layers, as the table says.
"""

import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from co2 import program
from co2.errors import ConfigError, require
from co2.record.files import whole_lines
from co2.record.provenance import provenance
from co2.record.table import Table
from recipes.rehearse import data
from recipes.runs.cells import own_words

METHODS = ("allreduce", "slowmo", "co2")
COMMON = (
    "scale=paper",
    "train.steps=3",
    "train.eval_every=2",
    "checkpoint.every=2",
    "checkpoint.keep=2",
    "log.every=1",
    "log.wandb=disabled",
    "train.compile=false",
    "slowmo.tau=1",
    "co2.tau=1",
    "data.workers=1",
    "launch.backend=gloo",
)
HEAD = (
    "task",
    "method",
    "model",
    "parameters of a worker, M",
    "workers",
    "peak of a worker, GiB",
    "first loss",
    "loss of guessing",
    "resumed",
    "seconds",
)
OFF = 1.0
"""How far the first loss may be from that of random guessing, in nats."""


@dataclass(frozen=True)
class Rehearsal:
    """What a task's published recipe needs beside `COMMON`."""

    sets: tuple[str, ...]
    """Names of the data, as `data.SETS` has them."""
    classes: int | None = None
    """Classes, or tokens of the vocabulary, among which an untrained model guesses."""
    batch: int = 1
    """Samples in the micro-batch of a worker."""
    words: tuple[str, ...] = ()
    workers: int = 2
    cut: str = ""
    """What of the model is left out."""
    root: str = "data"
    """Its `data.root`."""
    weight: float = 1.0
    """Weights of all losses that training adds up, together."""


REHEARSALS = {
    "resnet50": Rehearsal(("imagenet",), 1000, 4, ("resnet50.eval_samples=8",)),
    "vit": Rehearsal(("imagenet",), 1000, 4, ("vit.eval_samples=8",)),
    "ade20k": Rehearsal(("ade20k",), 150, 2, ("ade20k.eval_samples=8",), weight=1.4),
    "shapenet": Rehearsal(
        ("shapenet",), None, 4, ("shapenet.eval_samples=8", "shapenet.svm_samples=64")
    ),
    "gpt2": Rehearsal(
        ("openwebtext",),
        50_257,
        1,
        ("gpt2.eval_samples=8", "gpt2.layers=6"),
        cut="6 of 12 layers",
    ),
    "transnormer": Rehearsal(
        ("few_words",),
        # An untrained one does not guess: embedding, times √width, and logits share a matrix, so it
        # predicts the token that it sees. Its first loss is far above ln(tokens).
        None,
        1,
        (
            *("transnormer.eval_samples=8", "transnormer.size=1b", "transnormer.layers=1"),
            "mesh.replica_size=2",
        ),
        workers=4,
        cut="1 layer of the 1B model, 8,192 of 50,257 tokens",
        root="data/few_words",
    ),
    "roberta": Rehearsal(
        ("wikibooks",),
        50_265,
        2,
        ("roberta.eval_samples=8", "roberta.layers=2"),
        cut="2 of 24 layers",
    ),
    "glue": Rehearsal(("glue", "wikibooks"), 3, 4, ("glue.eval_samples=8",)),
    "moe": Rehearsal(
        ("openwebtext",),
        50_257,
        1,
        ("moe.eval_samples=8", "moe.size=small-8e", "moe.layers=2"),
        cut="2 of 12 layers, 8 of 64 experts",
    ),
    "graph": Rehearsal(("graph",), 172, 64, ("graph.eval_samples=8", "data.workers=0")),
}


class Implausible(Exception):
    """What is wrong, in one line."""


def command(task: str, method: str, folder: Path, given: Sequence[str]) -> Sequence[str]:
    """The words of train.py, of which the last ones win."""
    own = REHEARSALS[task]
    words = [f"task={task}", f"method={method}", *COMMON, f"launch.workers={own.workers}"]
    words += [f"train.batch_size={own.batch}", f"train.global_batch={own.batch * own.workers}"]
    words += [f"data.root={folder / own.root}", f"runs={folder / 'runs'}", *own.words, *given]
    return own_words(words)


def rehearse(task: str, method: str, folder: Path, given: Sequence[str]) -> dict[str, object]:
    """Run a recipe below `folder`, which holds the data. Returns a line of the table.

    Raises:
        Implausible: it fails, or a loss is not what it should be.
    """
    words, began = command(task, method, folder, given), time.monotonic()
    run = trained(words, folder)
    summary = json.loads((run / "summary.json").read_text())
    first, *_, third = losses(run)
    evaluated = summary["final"]["loss"]
    _undo_third_step(run)
    again = losses(trained(words, folder))[-1]
    shutil.rmtree(folder / "runs")
    guess = _guess(task)
    for name, loss in (("first", first), ("third", third), ("validation", evaluated)):
        if not math.isfinite(loss):
            raise Implausible(f"the {name} loss is {loss}")
    if guess is not None and abs(first - guess) > OFF:
        raise Implausible(f"the first loss is {first:.2f}, that of guessing is {guess:.2f}")
    if again != third:
        raise Implausible(f"the third step has loss {third!r}, resumed {again!r}")
    memory = summary["memory"]
    return {
        "task": task,
        "method": method,
        "parameters of a worker, M": f"{memory['parameter_bytes'] / 4e6:.1f}",
        "model": REHEARSALS[task].cut or "whole",
        "workers": str(summary["workers"]),
        "peak of a worker, GiB": f"{summary['peak_memory_bytes'] / 2**30:.1f}",
        "first loss": f"{first:.3f}",
        "loss of guessing": "—" if guess is None else f"{guess:.3f}",
        "resumed": "same",
        "seconds": f"{time.monotonic() - began:.0f}",
    }


def _guess(task: str) -> float | None:
    own = REHEARSALS[task]
    return None if own.classes is None else own.weight * math.log(own.classes)


def trained(words: Sequence[str], folder: Path) -> Path:
    """Run train.py; return the run's folder."""
    done = subprocess.run(
        [sys.executable, "-m", "co2", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        said = done.stdout.strip().splitlines() or ["it said nothing"]
        killed = " (a worker was killed; is memory short?)" if done.returncode == 137 else ""
        raise Implausible(f"status {done.returncode}{killed}: {said[-1]}")
    (summary,) = (folder / "runs").glob("**/summary.json")
    return summary.parent


def losses(run: Path) -> list[float]:
    """Training losses of the three steps."""
    lines: list[dict[str, Any]] = whole_lines(run / "metrics.jsonl")
    return [line["loss"] for line in lines if line["kind"] == "train"]


def _undo_third_step(run: Path) -> None:
    """Leave a run as if it had been killed in its third step."""
    (run / "summary.json").unlink()
    (run / "model.pt").unlink(missing_ok=True)
    shutil.rmtree(run / "checkpoints" / "step_3")


def _chosen(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """The pairs of task and method that the words choose, and the other words."""
    tasks, methods, others = list(REHEARSALS), list(METHODS), []
    for word in words:
        key, equals, value = word.partition("=")
        require(bool(equals), "rehearse", word, "must be KEY=VALUE, such as task=vit")
        if key == "task":
            require(value in REHEARSALS, key, value, f"choose of {', '.join(REHEARSALS)}")
            tasks = [value]
        elif key == "method":
            methods = [value]
        else:
            others.append(word)
    return [(task, method) for task in tasks for method in methods], others


def _rows(
    pairs: Sequence[tuple[str, str]], folder: Path, given: Sequence[str]
) -> Iterator[dict[str, object]]:
    for number, (task, method) in enumerate(pairs, 1):
        print(f"{number}/{len(pairs)}  {task} under {method} …", file=sys.stderr, flush=True)
        for name in REHEARSALS[task].sets:
            data.make(name, folder / "data")
        try:
            row = rehearse(task, method, folder, given)
        except Implausible as wrong:
            words = " ".join(command(task, method, folder, given))
            print(f"{task} under {method}: {wrong}\n  train.py {words}", file=sys.stderr)
            shutil.rmtree(folder / "runs", ignore_errors=True)
            yield {"task": task, "method": method, "resumed": f"failed: {wrong}"}
        else:
            print("   ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            yield row


def write(rows: Sequence[dict[str, object]], path: Path) -> None:
    """Write the table of a whole rehearsal."""
    whole = [{key: row.get(key) for key in HEAD} for row in rows]
    page = replace(
        Table.of_records(whole, HEAD),
        title="A dress rehearsal of the published recipes",
        text="Every task at scale=paper with few generated samples: three steps, an evaluation, a "
        "checkpoint, and the third step once more from it. Losses are in nats, of bf16. Seconds "
        "are of both starts; other work on the machine was not excluded.",
        source=provenance(),
    )
    path.write_text(page.page())


def main(argv: Sequence[str] | None = None) -> int:
    """Rehearse. Returns 0; 1 where something failed; 2 for a wrong word. A whole rehearsal is
    written to results/rehearsal.md."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & {*words}:
        print(__doc__)
        return 0
    try:
        pairs, given = _chosen(words)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="rehearsal") as folder:
        rows = list(_rows(pairs, Path(folder), given))
    failed = [row for row in rows if row["resumed"] != "same"]
    if not words:
        write(rows, Path("results/rehearsal.md"))
    print(f"{len(rows) - len(failed)} of {len(rows)} went well")
    return 1 if failed else 0


if __name__ == "__main__":
    program.run(main)
