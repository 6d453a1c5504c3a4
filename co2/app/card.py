"""The README.md of an exported model: what it is, where it comes from, and how to read it."""

from collections.abc import Collection

from co2.app.finished import Finished
from co2.task import Package

_SMOKE = (
    "This is smoke scale: a small model, trained for minutes on little or generated data. The "
    "figures show that the code works. They are no measure of the method or of the architecture."
)


def card(found: Finished, package: Package, files: Collection[str]) -> str:
    """The text.

    Args:
        found: the run.
        package: how others read it.
        files: names of those beside the weights.
    """
    config, summary = found.config, found.summary
    figures = {**summary.final, **summary.baselines}
    lines = [
        f"# {config.task}, trained with {config.method}",
        "",
        f"The mean of the replicas' weights after {summary.steps} steps on {summary.workers} "
        "workers.",
        "",
        f"- Run: `{summary.folder}`",
        f"- Command: `{found.command}`",
        f"- Commit of the CO2 suite: {found.commit}",
        f"- Data: {found.data.get('data', 'generated')}",
        f"- Scale: {config.scale}, seed {config.train.seed}",
        "",
        "On validation data, with what no model should be worse than:",
        "",
        *(f"- {name}: {_figure(value)}" for name, value in figures.items()),
        "",
    ]
    if config.scale == "smoke":
        lines += [_SMOKE, ""]
    if package.note:
        lines += [package.note, ""]
    if "tokenizer.json" not in files and found.task.unit == "tokens":
        lines += ["Its data have no tokenizer of their own, so there is none here.", ""]
    lines += ["To read it, where FOLDER is this folder:", "", "```python", package.usage, "```", ""]
    lines += [
        f"`init_from=FOLDER` starts another run of task={config.task} from it.",
        "",
    ]
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
