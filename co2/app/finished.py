"""A finished run, opened from its folder: configuration, figures, task and model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from co2.app.schema import typed
from co2.config import Config
from co2.errors import ConfigError, nearest, require
from co2.peers import known_methods
from co2.record.folder import changed_data, without_gone
from co2.record.metrics import Summary
from co2.task import Task
from co2.train import weights

KEY = "RUN"
"""The argument, for errors."""
UNKNOWN = "unknown"
"""Command or commit of a run that was started without one."""
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a damaged file of text raises."""


@dataclass(frozen=True)
class Finished:
    """A finished run."""

    folder: Path
    given: str
    """The folder as it was given, for errors."""
    config: Config
    settings: dict[str, Any]
    """Those of the task, plain. `Any`: they are as YAML holds them."""
    command: str
    """The command line that started it."""
    commit: str
    data: dict[str, Any]
    """What identifies its data. `Any`, because it is JSON."""
    summary: Summary
    task: Task
    """Set up: its data are open."""

    def model(self, name: str = weights.MODEL) -> nn.Module:
        """A new model with the run's final weights, in the file `name`, on the CPU, for evaluation.
        Raises `ConfigError` if they are damaged."""
        model, path = self.task.model(), self.folder / name
        saved = weights.read(path, KEY, self.given)
        weights.copy(model, saved, KEY, self.given, path.name)
        return model.eval()


def opened(tasks: Mapping[str, type[Task]], given: str) -> Finished:
    """Open the folder of a finished run of one of these tasks, and the data of its task.

    Raises:
        ConfigError: there is no such folder, it holds no finished run of a known task, one of its
            files is damaged, or its data are gone or others than it was trained on.
    """
    folder = Path(given)
    require(folder.is_dir(), KEY, given, "no such folder; give the folder of a finished run")
    exported = (folder / weights.EXPORTED).is_file()
    for name in ("summary.json", weights.MODEL):
        hint = f"holds no {name}: it is no finished run; train it to its end first"
        if exported:
            hint = "holds an exported model; give the folder of the run that it was made of"
        require((folder / name).is_file(), KEY, given, hint)
    try:
        values = yaml.safe_load((folder / "config.yaml").read_text())
        manifest = json.loads((folder / "manifest.json").read_text())
        name, command = str(values["task"]), str(manifest["command"] or UNKNOWN)
        data, commit = dict(manifest["data"]), str(manifest["git"].get("commit", UNKNOWN))
        summary = Summary.read(folder)
    except (*_DAMAGE, yaml.YAMLError):
        hint = "its config.yaml, manifest.json or summary.json is missing or damaged"
        raise ConfigError(KEY, given, f"{hint}; train that run again") from None
    assert summary is not None, "its file is there"
    hint = f"is a run of task={name}; {nearest(name, tasks)}"
    require(name in tasks, KEY, given, hint)
    try:
        config = typed(without_gone(values), known_methods(), tasks)
    except ConfigError as error:
        hint = f"its config.yaml does not fit this version of the suite: {error}"
        raise ConfigError(KEY, given, hint) from None
    task = tasks[name](config.task_config, config.train, config.optim, config.data)
    _open_data(task, data, given)
    settings = values.get(name, {})
    return Finished(folder, given, config, settings, command, commit, data, summary, task)


def _open_data(task: Task, then: Mapping[str, Any], given: str) -> None:
    """Set the task up, with the data that the run has seen: vocabulary and classes are theirs."""
    try:
        task.setup(1)
    except ConfigError as error:
        hint = f"its data are needed, as where it was trained: {error}"
        raise ConfigError(KEY, given, hint) from None
    change = changed_data(then, task.fingerprint(), ("tokens_sha256", "num_classes", "text"))
    if change is not None:
        raise ConfigError(KEY, given, change)
