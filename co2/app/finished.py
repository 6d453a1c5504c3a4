"""A finished run, opened from its folder: configuration, figures, task and model."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from co2.app.schema import typed
from co2.config import Config
from co2.errors import ConfigError, nearest, require
from co2.record.files import DAMAGE
from co2.record.folder import changed_data
from co2.record.metrics import Summary
from co2.task import Task
from co2.train import weight_files


@dataclass(frozen=True)
class Finished:
    """A finished run."""

    folder: Path
    config: Config
    settings: dict[str, Any]
    """Those of the task, plain. `Any`: they are as YAML holds them."""
    command: str
    """The command line that started it, or "unknown"."""
    commit: str
    """Of the suite, or "unknown"."""
    data: dict[str, Any]
    """What identifies its data. `Any`, because it is JSON."""
    summary: Summary
    task: Task
    """Set up: its data are open."""

    def model(self, name: str = weight_files.MODEL) -> nn.Module:
        """A new model with the run's final weights, in the file `name`, on the CPU, for evaluation.
        Raises `ConfigError` if they are damaged."""
        model, path, run = self.task.model(), self.folder / name, str(self.folder)
        weight_files.copy(model, weight_files.read(path, "RUN", run), "RUN", run, path.name)
        return model.eval()


Open = Callable[[str], Finished]
"""What an application opens a run's folder with; see `opened`."""


def opened(tasks: Mapping[str, type[Task]], methods: Mapping[str, type], given: str) -> Finished:
    """Open the folder of a finished run of one of these tasks and methods, and the data of its
    task. Raises `ConfigError` for any other folder, a damaged file, and data that are gone or
    others than it was trained on."""
    folder = Path(given)
    require(folder.is_dir(), "RUN", given, "no such folder; give the folder of a finished run")
    exported = (folder / weight_files.EXPORTED).is_file()
    for name in ("summary.json", weight_files.MODEL):
        hint = f"holds no {name}: it is no finished run; train it to its end first"
        if exported:
            hint = "holds an exported model; give the folder of the run that it was made of"
        require((folder / name).is_file(), "RUN", given, hint)
    try:
        values = yaml.safe_load((folder / "config.yaml").read_text())
        manifest = json.loads((folder / "manifest.json").read_text())
        name, command = str(values["task"]), str(manifest["command"] or "unknown")
        data, commit = dict(manifest["data"]), str(manifest["git"].get("commit", "unknown"))
        summary = Summary.read(folder)
    except (*DAMAGE, yaml.YAMLError):
        hint = "its config.yaml, manifest.json or summary.json is missing or damaged"
        raise ConfigError("RUN", given, f"{hint}; train that run again") from None
    assert summary is not None, "its file is there"
    require(name in tasks, "RUN", given, f"is a run of task={name}; {nearest(name, tasks)}")
    hint = "its config.yaml does not fit this version of the suite"
    try:
        config = typed(values, methods, tasks)
        task = tasks[name](config.task_config, config.train, config.optim, config.data)
        hint = "its data are needed, as where it was trained"
        task.setup(1)
    except ConfigError as error:
        raise ConfigError("RUN", given, f"{hint}: {error}") from None
    # The model's vocabulary and classes are those of its data.
    change = changed_data(data, task.fingerprint(), ("tokens_sha256", "num_classes", "text"))
    if change is not None:
        raise ConfigError("RUN", given, change)
    settings = values.get(name, {})
    return Finished(folder, config, settings, command, commit, data, summary, task)
