"""Cells: the runs behind the values of a table. Only those without a finished run are trained.

There are three kinds: `TrainCell` here is a run of train.py, `LabCell` (laboratory.py) one on slow
links, and `FunctionCell` (functions.py) a training that a recipe's own function makes.
"""

import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import yaml

from co2.app.tuned import Settings, Tuned
from co2.config import Config
from co2.errors import STOPPED, require
from co2.record.folder import check_data, check_folder, run_folder, settings_digest
from co2.record.provenance import Origin, of_run
from co2.start import launch
from train import APP

SummaryJSON = dict[str, Any]
"""A run's summary.json. Any: it holds numbers, texts and groups of either."""


class Cell(Protocol):
    """The run behind a value of a table."""

    @property
    def command(self) -> str:
        """What makes this run. Two cells with the same command are the same run."""

    @property
    def digest(self) -> str:
        """Of settings that the command leaves to conf: with others it would be another run. Empty
        where the command gives all of them."""

    def check(self) -> None:
        """Raise `ConfigError` if this run cannot be made."""

    def summary(self) -> SummaryJSON | None:
        """The figures of the finished run; None while there is none. Raises `ConfigError` if its
        folder holds a run of other settings."""

    def source(self) -> dict[str, str]:
        """Commit, hardware and folder of the finished run."""


@dataclass(frozen=True)
class TrainCell:
    """A run of train.py, identified by its overrides."""

    overrides: tuple[str, ...]
    recipes: tuple[str, ...] = field(default=(), compare=False)
    """Names of the recipes that use this run; they become tags of its W&B run."""

    @property
    def command(self) -> str:
        words = ["python train.py", *self.overrides]
        if "tuned=true" in self.overrides:
            # What was tuned follows as a comment: with another winner it is another run.
            settings = self.tuned_settings().items()
            words.append(f" # {' '.join(f'{name}={value}' for name, value in settings)}")
        return " ".join(words)

    @property
    def digest(self) -> str:
        return settings_digest(self.config())

    @property
    def origin(self) -> Origin:
        """The run's command and tags."""
        return Origin(shlex.join(["train.py", *self.overrides]), self.recipes)

    def config(self) -> Config:
        """The composed configuration. Raises `ConfigError`."""
        return composed_config(self.overrides)

    def check(self) -> None:
        self.config()

    def summary(self) -> SummaryJSON | None:
        words = dict(word.split("=", 1) for word in self.overrides)
        task, method, seed = (words.get(key, "*") for key in ("task", "method", "train.seed"))
        runs = Path(words.get("runs", "results/runs"))
        if not any(runs.glob(f"{task}/{method}/*/seed{seed}")):
            return None  # composing two thousand configurations takes two minutes
        config = self.config()
        found = read_summary(run_folder(config))
        if found is not None:
            check_folder(config, config.launch.workers, as_it_is=True)  # conf may have changed
        return found

    def source(self) -> dict[str, str]:
        folder = run_folder(self.config())
        return {**of_run(folder), "folder": os.path.relpath(folder)}

    def begun(self) -> bool:
        """Whether there is a folder of the run that tells where it comes from."""
        return (run_folder(self.config()) / "manifest.json").exists()

    def is_tuned(self) -> bool:
        """Whether there are the settings that this run asks for, if it has `tuned=true`."""
        return "tuned=true" not in self.overrides or (APP.conf / self._tuned().file).exists()

    def tuned_settings(self) -> Settings:
        """What `tuned=true` stands for in this run. Raises `ConfigError` if nothing was tuned."""
        return self._tuned().settings(APP.conf)

    def _tuned(self) -> Tuned:
        words = dict(word.split("=", 1) for word in self.overrides)
        task, method, scale = (words[key] for key in ("task", "method", "scale"))
        own = {key.partition(".")[2]: words[key] for key in words if key.startswith(f"{method}.")}
        return tuned(task, method, scale, own)


def tuned(task: str, method: str, scale: str, node: Mapping[str, object]) -> Tuned:
    """The settings of a method that are tuned as one; `node` are those given, by key."""
    return Tuned(task, method, scale, node, APP.methods[method].Config)


def tuned_words(task: str, method: str) -> tuple[str, ...]:
    """What was tuned for a task and method at smoke scale and conf's own τ, as overrides. For runs
    with another τ, too, with which `tuned=true` is refused unless that was tuned. Raises
    `ConfigError` if nothing was tuned."""
    settings = tuned(task, method, "smoke", {}).settings(APP.conf)
    return tuple(f"{name}={value}" for name, value in settings.items())


def is_of(line: Mapping[str, str], cell: Cell) -> bool:
    """Whether a line of ours.csv is of this cell's run."""
    # The digest last: to compose a configuration takes a while.
    return line["command"] == cell.command and line["digest"] == cell.digest


def own_words(words: Iterable[str]) -> tuple[str, ...]:
    """The `key=value` words that one run takes, each key once.

    Where a key is given twice the last value counts, at the place of the first; `key=×2` doubles
    the value given before, so that one row may stand in columns of several tasks. Words of other
    methods' nodes are dropped, so that a column may set `slowmo.tau=48` and `diloco.tau=48` for
    rows of either method.
    """
    values: dict[str, str] = {}
    for word in words:
        key, value = word.split("=", 1)
        if value.startswith("×"):
            value = f"{float(values[key]) * float(value[1:]):.6g}"
        values[key] = value
    others = APP.methods.keys() - {values.get("method")}
    return tuple(
        f"{key}={value}" for key, value in values.items() if key.partition(".")[0] not in others
    )


def once(cells: Iterable[TrainCell]) -> list[TrainCell]:
    """Every run once, with the names of all recipes that use it."""
    names: dict[TrainCell, dict[str, None]] = {}
    for cell in cells:
        names.setdefault(cell, {}).update(dict.fromkeys(cell.recipes))
    return [replace(cell, recipes=tuple(found)) for cell, found in names.items()]


def read_summary(folder: Path) -> SummaryJSON | None:
    """The summary of a run's folder; None while the run has not finished. Raises `ConfigError` if
    it is damaged."""
    path = folder / "summary.json"
    try:
        found = json.loads(path.read_text()) if path.exists() else None
    except (OSError, ValueError, RecursionError):
        found = ""
    hint = "is damaged; move the folder away, and the same command trains it again"
    require(found is None or isinstance(found, dict), "summary", path, hint)
    return found


def run(
    cells: Iterable[TrainCell], print_line: Callable[[str], None] = print
) -> dict[TrainCell, int]:
    """Train every cell that has no finished run; interrupted runs continue from their checkpoints.

    Cells with the same number of workers run one after the other in the same processes, which saves
    the time to start them: about twelve seconds a run on a small machine. The peak memory of a run
    therefore includes that of the runs before it.

    Returns:
        The exit statuses of the runs that failed. A failure does not stop the others.
    Raises:
        SystemExit: after Ctrl-C, when everything is saved; the same call continues from there.
        ConfigError: if a cell cannot be run, before any is started.
    """
    missing = [cell for cell in once(cells) if cell.summary() is None]
    failed: dict[TrainCell, int] = {}
    for workers in sorted({cell.config().launch.workers for cell in missing}):
        left = [cell for cell in missing if cell.config().launch.workers == workers]
        while left:
            for cell in left:
                config = cell.config()
                task = APP.make_task(config)
                task.setup(workers)  # data are made here, once
                check_data(config, task.fingerprint())
            print_line(
                f"{len(left)} runs of {workers} workers to train; the next: {left[0].command}"
            )
            status = launch.run(partial(_train, tuple(left)), left[0].config())
            left = [cell for cell in left if cell.summary() is None]
            if status in STOPPED:
                raise SystemExit(status)
            if status and left:
                print_line(f"failed with exit status {status}: {left[0].command}")
                failed[left.pop(0)] = status
    return failed


@cache
def composed_config(overrides: tuple[str, ...]) -> Config:
    """What train.py makes of these overrides. Raises `ConfigError`."""
    return APP.config(overrides)


def _train(cells: Sequence[TrainCell], _: Config) -> None:
    """Train these cells; every worker calls this."""
    for cell in cells:
        APP.work(cell.config(), cell.origin)


def rounds(summary: SummaryJSON) -> float:
    """How many times the replicas have exchanged anything in the training.

    A method that does not count them has one every τ steps, of each of its fragments.
    """
    if "rounds" in summary:
        return float(summary["rounds"])
    config = yaml.safe_load((Path(summary["folder"]) / "config.yaml").read_text())
    own = config.get(summary["method"]) or {}
    return float(summary["steps"] // own.get("tau", 1) * own.get("fragments", 1))
