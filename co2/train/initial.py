"""Starting from the weights of another run: init_from=FOLDER.

The weights are the run's final consensus, `model.pt`. Every parameter and buffer must have a
namesake of the same shape there, apart from the heads that a task for fine-tuning names: those of
the new model are new. Weights are read at a run's first start alone; later ones go on from its
checkpoints.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from co2.config import Config, Resume
from co2.errors import ConfigError, require
from co2.record.folder import run_folder
from co2.task import FineTuning, Task

KEY = "init_from"


def check(config: Config, task: Task) -> None:
    """Refuse a folder that this run cannot start from, before any worker starts.

    Args:
        config: of the run.
        task: set up.
    Raises:
        ConfigError: no folder, no finished run in it, or one of another task or another model.
    """
    value = config.init_from
    if value is None or (config.resume is Resume.auto and begun(run_folder(config))):
        return
    folder = Path(value)
    require(folder.is_dir(), KEY, value, "no such folder; give the folder of a finished run")
    for name in ("summary.json", "model.pt"):
        hint = f"holds no {name}: it is no finished run; train it to its end first"
        require((folder / name).is_file(), KEY, value, hint)
    try:
        run: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text())
        data = json.loads((folder / "manifest.json").read_text())["data"]
        reason = _objection(config, task, run, data)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError):
        hint = "its config.yaml or manifest.json is missing or damaged; train that run again"
        raise ConfigError(KEY, value, hint) from None
    if reason is not None:
        raise ConfigError(KEY, value, reason)
    with torch.device("meta"):
        model = task.model()
    saved = _saved(value)
    for name in _agreeing(model.state_dict(), saved, value, task):
        hint = f"model.pt has a weight that is not finite, in {name}; give a run that has learned"
        require(bool(saved[name].isfinite().all()), KEY, value, hint)


def load(value: str, module: nn.Module, task: Task) -> None:
    """Copy the weights of the run in folder `value`. Raises `ConfigError` as `check` does."""
    own, saved = module.state_dict(), _saved(value)
    with torch.no_grad():
        for name in _agreeing(own, saved, value, task):
            own[name].copy_(saved[name])


def begun(folder: Path) -> bool:
    """Whether a run's folder holds checkpoints, from which it goes on."""
    return any((folder / "checkpoints").glob("step_*"))


def described(config: Config) -> dict[str, str] | None:
    """The folder, and the sha256 of the weights, for manifest.json. A run that goes on keeps what
    it has recorded at its start. Raises `ConfigError` if the weights cannot be read."""
    if config.init_from is None:
        return None
    folder = run_folder(config)
    if begun(folder) and (folder / "manifest.json").exists():
        kept: dict[str, str] | None = json.loads((folder / "manifest.json").read_text())[KEY]
        return kept
    try:
        with _weights(config.init_from).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        hint = f"its model.pt cannot be read ({error.strerror}); train that run to its end first"
        raise ConfigError(KEY, config.init_from, hint) from None
    return {"folder": config.init_from, "sha256": digest}


def _objection(
    config: Config, task: Task, run: Mapping[str, Any], data: Mapping[str, Any]
) -> str | None:
    if isinstance(task, FineTuning):
        return task.objection(run, data)
    there, here = run["task"], config.task
    return None if there == here else f"is a run of task={there}; give one of task={here}"


def _agreeing(
    own: Mapping[str, Tensor], saved: Mapping[str, Tensor], value: str, task: Task
) -> list[str]:
    """The names of the weights to copy. Raises `ConfigError` for the first other one that is no
    head's."""
    heads = task.heads if isinstance(task, FineTuning) else ()
    names = []
    for name in dict.fromkeys((*own, *saved)):
        there, here = (_shape(weights.get(name)) for weights in (saved, own))
        if there == here:
            names.append(name)
        elif not name.startswith(heads):
            hint = f"{name} has the shape {there} there and {here} here; give this run that model"
            raise ConfigError(KEY, value, hint)
    return names


def _shape(weight: Tensor | None) -> str:
    return "none" if weight is None else f"({', '.join(map(str, weight.shape))})"


def _saved(value: str) -> dict[str, Tensor]:
    """The weights, mapped from the file: what is not looked at is not read."""
    try:
        saved = torch.load(_weights(value), map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch and pickle raise many kinds
        hint = f"model.pt cannot be read ({type(error).__name__}); train that run again"
        raise ConfigError(KEY, value, hint) from None
    good = isinstance(saved, dict) and all(isinstance(part, Tensor) for part in saved.values())
    require(good, KEY, value, "model.pt holds no weights by name; train that run again")
    return {str(name): weight for name, weight in saved.items()}


def _weights(value: str) -> Path:
    return Path(value) / "model.pt"
