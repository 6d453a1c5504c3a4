"""Starting from other weights: init_from=FOLDER.

The weights are the final consensus of a run, `model.pt`, whose folder it is, or those of a folder
as `co2 export` writes it and other libraries keep it, `model.safetensors`. Every parameter and
buffer must have a namesake of the same shape there. Only the heads that a task for fine-tuning
names are new. Weights are read at a run's first start; later starts go on from its checkpoints.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from co2.config import Config, Resume
from co2.errors import ConfigError, require
from co2.record.folder import begun, kept_manifest, run_folder
from co2.task import FineTuning, Portable, Task
from co2.train import weight_files

KEY = "init_from"
_AGAIN = "export it or download it again"


def check(config: Config, task: Task) -> None:
    """Refuse a folder that this run cannot start from, before any worker starts.

    Args:
        config: of the run.
        task: set up.
    Raises:
        ConfigError: no folder, neither a finished run nor an exported model in it, or one of
            another task, another model or another vocabulary.
    """
    value = config.init_from
    if value is None or (config.resume is Resume.auto and begun(run_folder(config))):
        return
    folder = Path(value)
    require(folder.is_dir(), KEY, value, "no such folder; give the folder of a finished run")
    with torch.device("meta"):
        model = task.model()
    if _file(folder).name == weight_files.EXPORTED:
        reason = _objection_to_exported(folder, value, model, config.task, task)
    else:
        reason = _objection_to_run(folder, value, config.task, task)
    if reason is not None:
        raise ConfigError(KEY, value, reason)
    load(value, model, task)


def load(value: str, module: nn.Module, task: Task) -> None:
    """Copy the weights of the folder `value`. Raises `ConfigError` as `check` does."""
    path = _file(Path(value))
    saved = weight_files.read(path, KEY, value)
    if path.name == weight_files.EXPORTED and isinstance(task, Portable):
        saved = task.adopted(saved)
    heads = task.heads if isinstance(task, FineTuning) else ()
    weight_files.copy(module, saved, KEY, value, path.name, heads)


def described(config: Config) -> dict[str, str] | None:
    """The folder, and the sha256 of the weights, for manifest.json. A run that goes on keeps what
    it has recorded at its start. Raises `ConfigError` if the weights cannot be read."""
    if config.init_from is None:
        return None
    folder = run_folder(config)
    if begun(folder):
        kept: dict[str, str] | None = kept_manifest(folder).get(KEY)
        return kept
    path = _file(Path(config.init_from))
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        hint = f"its {path.name} cannot be read ({error.strerror}); train that run to its end first"
        raise ConfigError(KEY, config.init_from, hint) from None
    return {"folder": config.init_from, "sha256": digest}


def _objection_to_run(folder: Path, value: str, name: str, task: Task) -> str | None:
    """Why this task, called `name`, cannot start from a run. Raises `ConfigError` for none."""
    for file in ("summary.json", weight_files.MODEL):
        hint = f"holds no {file}: it is no finished run; train it to its end first"
        if not (folder / "config.yaml").exists():
            hint += f", or give a folder with a {weight_files.EXPORTED}"
        require((folder / file).is_file(), KEY, value, hint)
    try:
        run: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text())
        data = json.loads((folder / "manifest.json").read_text())["data"]
        if isinstance(task, FineTuning):
            return task.objection(run, data)
        return _of_another_task(run["task"], name)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError):
        hint = "its config.yaml or manifest.json is missing or damaged; train that run again"
        raise ConfigError(KEY, value, hint) from None


def _objection_to_exported(
    folder: Path, value: str, model: nn.Module, name: str, task: Task
) -> str | None:
    """The same for an exported model, or one that another library has written."""
    from safetensors import SafetensorError, safe_open

    reading = weight_files.EXPORTED
    try:
        with safe_open(folder / reading, "pt") as file:
            there = (file.metadata() or {}).get("task", name)
        if there != name and not isinstance(task, FineTuning):
            return _of_another_task(there, name)
        if not isinstance(task, Portable):
            return None
        texts: list[str | None] = []
        for reading in ("config.json", "tokenizer.json"):
            path = folder / reading
            texts.append(path.read_text(encoding="utf-8") if path.exists() else None)
    except (OSError, ValueError, SafetensorError) as error:
        hint = f"{reading} cannot be read ({type(error).__name__}); {_AGAIN}"
        raise ConfigError(KEY, value, hint) from None
    settings, tokenizer = texts
    try:
        known = json.loads(settings or "{}")
        json.loads(tokenizer or "{}")
        return task.refusal(model, known, tokenizer)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        hint = "its config.json or tokenizer.json is damaged or of another kind of model"
        raise ConfigError(KEY, value, f"{hint}; {_AGAIN}") from None


def _of_another_task(there: str, here: str) -> str | None:
    return None if there == here else f"is a run of task={there}; give one of task={here}"


def _file(folder: Path) -> Path:
    exported = folder / weight_files.EXPORTED
    return exported if exported.is_file() else folder / weight_files.MODEL
