"""Write a finished run's weights in the form that other libraries read.

python -m co2 export RUN FOLDER [--ema]

FOLDER, which must not exist yet or be empty, gets model.safetensors with the consensus of the
replicas, config.json, a README.md that says how to read them, and the tokenizer of a language
model. It appears whole or not at all.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from torch import Tensor, nn

from co2.app.card import card
from co2.app.finished import Finished, opened
from co2.arguments import Parser
from co2.errors import ConfigError, require
from co2.record.files import write_durably
from co2.task import Package, Portable, Task
from co2.train import launch
from co2.train.weights import EMA_MODEL, EXPORTED, MODEL, save, ties
from co2.whole import written_aside

_KEY = "FOLDER"
_TAKEN = "exists and is not empty; give a new folder"


def main(tasks: Mapping[str, type[Task]], argv: Sequence[str]) -> int:
    """The command line. Returns 0, or 2 for a wrong value."""
    parser = Parser(
        prog="python -m co2 export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a finished run")
    parser.add_argument("folder", metavar="FOLDER", help="a new folder")
    text = "the moving average of the weights, of a run with train.ema_decay"
    parser.add_argument("--ema", action="store_true", help=text)
    options = parser.parse_args(argv)
    try:
        export(tasks, options.run, options.folder, options.ema)
    except ConfigError as error:
        return launch.refuse(error)
    print(f"{options.folder}: {', '.join(sorted(os.listdir(options.folder)))}")
    return 0


def export(tasks: Mapping[str, type[Task]], run: str, given: str, ema: bool = False) -> None:
    """Write the weights of the run in folder `run`, of one of these tasks, to the folder `given`;
    with `ema` their moving average.

    Raises:
        ConfigError: there is no finished run, or the folder cannot be written or is taken.
    """
    try:
        folder = Path(given).resolve()
        require(not _taken(folder), _KEY, given, _TAKEN)
        found = opened(tasks, run)
        hint = f"{run} holds no {EMA_MODEL}; train with train.ema_decay, or export without --ema"
        require(not ema or (found.folder / EMA_MODEL).is_file(), "--ema", ema, hint)
        model = found.model(EMA_MODEL if ema else MODEL)
        package = Package({})
        if isinstance(found.task, Portable):
            package = found.task.package(model)
        files = {"config.json": _own_config(found, package), **package.files}
        files["README.md"] = card(found, package, files)
        with written_aside(folder, lambda: _refuse(given)) as aside:
            _write(aside, files, once(model, package.prefix), _header(found))
    except OSError as error:
        hint = f"{error.filename or given}: {error.strerror or error}; give a folder that can be "
        raise ConfigError(_KEY, given, f"{hint}written") from None


def once(model: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The weights and buffers of a model by name, without the prefix. A parameter of several names
    has its first one only: safetensors keep no two names for the same memory."""
    again = ties(model)
    return {
        name.removeprefix(prefix): weight
        for name, weight in model.state_dict().items()
        if name not in again
    }


def _write(
    folder: Path, files: Mapping[str, str], weights: dict[str, Tensor], header: dict[str, str]
) -> None:
    for name, text in files.items():
        write_durably(folder / name, text)
    save(folder / EXPORTED, weights, header)


def _header(found: Finished) -> dict[str, str]:
    """What stands in the head of the file of weights."""
    return {
        "format": "pt",  # transformers reads no others
        "task": found.config.task,
        "method": found.config.method,
        "scale": found.config.scale,
        "command": found.command,
        "commit": found.commit,
    }


def _own_config(found: Finished, package: Package) -> str:
    """config.json of a model that no other library knows."""
    name = found.config.task
    return json.dumps({"task": name, name: found.settings, **package.config}, indent=2) + "\n"


def _taken(folder: Path) -> bool:
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def _refuse(given: str) -> NoReturn:
    """Called where something has come to the folder's place meanwhile, which is not replaced."""
    raise ConfigError(_KEY, given, _TAKEN)
