"""Write a finished run's weights in the form that other libraries read.

python -m co2 export RUN FOLDER [--ema]

FOLDER, which must not exist yet or be empty, gets model.safetensors with the consensus of the
replicas, config.json, a README.md that says how to read them, and the tokenizer of a language
model. It appears whole or not at all.
"""

import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NoReturn

from torch import Tensor, nn

from co2.app.finished import Finished, Open
from co2.arguments import Parser
from co2.atomic import write_durably, written_aside
from co2.errors import ConfigError, require
from co2.task import Package, Portable
from co2.train.weight_files import EMA_MODEL, EXPORTED, MODEL, save, ties

_SMOKE = (
    "This is smoke scale: a small model, trained for minutes on little or generated data. The "
    "figures show that the code works. They are no measure of the method or of the architecture."
)


def main(open_run: Open, argv: Sequence[str]) -> int:
    """The command line. Returns the exit status. Raises `ConfigError`."""
    parser = Parser(prog="python -m co2 export", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="the folder of a finished run")
    parser.add_argument("folder", metavar="FOLDER", help="a new folder")
    text = "the moving average of the weights, of a run with train.ema_decay"
    parser.add_argument("--ema", action="store_true", help=text)
    options = parser.parse_args(argv)
    try:
        _export(open_run, options.run, options.folder, options.ema)
    except OSError as error:
        hint = f"{error.filename or options.folder}: {error.strerror or error}; give a folder that "
        raise ConfigError("FOLDER", options.folder, f"{hint}can be written") from None
    print(f"{options.folder}: {', '.join(sorted(os.listdir(options.folder)))}")
    return 0


def _export(open_run: Open, run: str, given: str, ema: bool) -> None:
    """Write the weights of a run, or with `ema` their moving average, to the folder `given`."""
    folder = Path(given).resolve()

    def taken() -> NoReturn:
        raise ConfigError("FOLDER", given, "exists and is not empty; give a new folder")

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        taken()
    found = open_run(run)
    hint = f"{run} holds no {EMA_MODEL}; train with train.ema_decay, or export without --ema"
    require(not ema or (found.folder / EMA_MODEL).is_file(), "--ema", ema, hint)
    model, task = found.model(EMA_MODEL if ema else MODEL), found.config.task
    package = found.task.package(model) if isinstance(found.task, Portable) else Package({})
    config = {"task": task, task: found.settings, **package.config}
    files = {"config.json": json.dumps(config, indent=2) + "\n", **package.files}
    files["README.md"] = _card(found, package, files)
    head = {
        "format": "pt",  # transformers reads no others
        "task": task,
        "method": found.config.method,
        "scale": found.config.scale,
        "command": found.command,
        "commit": found.commit,
    }
    with written_aside(folder, taken) as aside:
        for name, text in files.items():
            write_durably(aside / name, text)
        save(aside / EXPORTED, once(model, package.prefix), head)


def once(model: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The weights and buffers of a model by name, without the prefix. A parameter of several names
    has its first one only: safetensors keep no two names for the same memory."""
    again = ties(model)
    return {
        name.removeprefix(prefix): weight
        for name, weight in model.state_dict().items()
        if name not in again
    }


def _card(found: Finished, package: Package, files: Collection[str]) -> str:
    """The README.md: what the model is, where it comes from, and how to read it. `files` are the
    names of those beside the weights."""
    config, summary = found.config, found.summary
    figures = [
        f"- {name}: {'not finite' if value is None else f'{value:.4g}'}"
        for name, value in {**summary.final, **summary.baselines}.items()
    ]
    untold = "tokenizer.json" not in files and found.task.unit == "tokens"
    paragraphs = [
        f"# {config.task}, trained with {config.method}",
        f"The mean of the replicas' weights after {summary.steps} steps on {summary.workers} "
        "workers.",
        f"- Run: `{summary.folder}`\n"
        f"- Command: `{found.command}`\n"
        f"- Commit of the CO2 suite: {found.commit}\n"
        f"- Data: {found.data.get('data', 'generated')}\n"
        f"- Scale: {config.scale}, seed {config.train.seed}",
        "On validation data, with what no model should be worse than:",
        "\n".join(figures),
        _SMOKE if config.scale == "smoke" else "",
        package.note,
        "Its data have no tokenizer of their own, so there is none here." if untold else "",
        "To read it, where FOLDER is this folder:",
        f"```python\n{package.usage}\n```",
        f"`init_from=FOLDER` starts another run of task={config.task} from it.\n",
    ]
    return "\n\n".join(filter(None, paragraphs))
