"""Runs as SLURM jobs: `python -m recipes run … --launcher slurm`. See docs/slurm.md."""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from co2.errors import require
from co2.program import python
from co2.record.folder import run_folder
from recipes.recipe import NODE
from recipes.runs.cells import APP, TrainCell, once

SCRIPT = Path(__file__).parents[2] / "slurm" / "train.sbatch"


def submit(cells: Sequence[TrainCell]) -> int:
    """Submit a job for every cell that has no finished run. Returns 0, or 1 if sbatch refused one.

    Raises:
        ConfigError: if a cell cannot be run or this machine has no SLURM, before any job is
            submitted.
    """
    hint = "submits slurm/train.sbatch, which a clone of the repository has"
    require(SCRIPT.exists(), "--launcher", "slurm", hint)
    require(shutil.which("sbatch") is not None, "--launcher", "slurm", "there is no sbatch here")
    missing = [cell for cell in once(cells) if cell.summary() is None]
    for cell in missing:
        APP.make_task(cell.config()).setup(cell.config().launch.workers)  # data are made here, once
    for count, cell in enumerate(missing):
        words = ["sbatch", *options(cell), str(SCRIPT), *cell.overrides]
        if subprocess.run(words, env=_tagged(cell)).returncode:
            print(f"{count} of {len(missing)} jobs submitted", file=sys.stderr)
            return 1
    command = f"{python()} -m recipes collect"
    print(f"{len(missing)} jobs submitted; run `{command}` when they have ended")
    return 0


def _tagged(cell: TrainCell) -> dict[str, str]:
    """The environment of a job. W&B's own variable carries the recipes' names into it."""
    tags = filter(None, (os.environ.get("WANDB_TAGS"), *cell.recipes))
    return {**os.environ, "WANDB_TAGS": ",".join(tags)}


def options(cell: TrainCell) -> list[str]:
    """What sbatch is told of a cell's job: its name, and nodes for its workers."""
    config = cell.config()
    folder = run_folder(config).relative_to(Path(config.runs).absolute())
    workers = config.launch.workers
    return [
        # Two jobs must not train in one folder. With one name, the second waits for the first.
        f"--job-name={folder}",
        "--dependency=singleton",
        # The script's own number of tasks would make it another run.
        f"--nodes={math.ceil(workers / NODE)}",
        f"--ntasks-per-node={min(workers, NODE)}",
    ]
