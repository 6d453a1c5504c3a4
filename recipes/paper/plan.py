"""What the published recipes would take: a plan of each of the CO2 paper's tasks, as a page.

    python -m recipes.paper.plan --gpus 64 --out results/plan.md
    python -m recipes.paper.plan scale=node --gpus 8 --out results/plan_node.md

It takes the flags and overrides of `python -m co2 plan`, a minute, and no GPU.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from co2 import program

with program.starting(__name__):
    from co2.app.plan import DoesNotFit, Need, Place, Planner, asked, course, gb, parser
    from co2.errors import ConfigError
    from co2.gpus import GPUS
    from co2.record.table import Table
    from co2.start import launch
    from co2.task import Planned
    from recipes.runs.cells import APP

TASKS = ("resnet50", "vit", "ade20k", "shapenet", "gpt2", "transnormer", "roberta")
_HEAD = ("task", "parameters", "GPUs", "global batch", "steps", "memory of a GPU", "flop a step",
         "MFU", "s a step", "bound by", "exposed", "exposed, allreduce", "days",
         "GPU-days", "checkpoint")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    flags = parser("python -m recipes.paper.plan", __doc__ or "")
    flags.add_argument("--out", type=Path, metavar="FILE", help="write the page into FILE")
    try:
        options, overrides, place, gpus = asked(flags, words)
        text = page(shlex.join(words), overrides, place, gpus)
    except ConfigError as error:
        return launch.refuse(error)
    print(text, end="")
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    return 0


def page(flags: str, overrides: Sequence[str], place: Place, gpus: int | None) -> str:
    """The plans of all tasks, with what they rest on. One that cannot be made says why."""
    rows: list[Sequence[object]] = []
    sources: dict[str, list[str]] = {}
    for task in TASKS:
        words = [f"task={task}", "scale=paper", *overrides]
        try:
            row, source = _row(task, words, place, gpus)
        except ConfigError as error:
            rows.append((task, error, *[""] * (len(_HEAD) - 2)))
        else:
            rows.append(row)
            sources.setdefault(source, []).append(task)
    whose = "of the task's own MFU" if place.mfu is None else f"at MFU {place.mfu:g}"
    text = f"""Worked out and simulated, not measured: `python -m recipes.paper.plan {flags}`. On
{place.gpu} {whose}, servers of {place.server_size} with a link of {place.link}.
Settings beside a task are those with which it fits. Where a batch does not divide among all GPUs,
it is planned for the nearest smaller number. A step takes as long as its computation, its launches
or its loading, whichever is longest, of which launches are counted too low. Exposed is the share of
the time that GPUs wait for the network."""
    own = "\n".join(f"- MFU of {', '.join(tasks)}: {source}" for source, tasks in sources.items())
    title = "What the published recipes would take"
    if scales := [word for word in overrides if word.startswith("scale=")]:
        title = f"What the recipes of {scales[-1]} would take"
    source = own if place.mfu is None else ""
    return Table(_HEAD, rows, title=title, text=text, source=source).page()


def _row(
    task: str, words: Sequence[str], place: Place, gpus: int | None
) -> tuple[Sequence[object], str]:
    """A line of the table, and the source of its MFU."""
    settings: Sequence[str] = ()
    try:
        need = _planned(words, place, gpus)
    except DoesNotFit as error:
        if not error.settings:
            raise
        settings = error.settings
        need = _planned([*words, *settings], place, gpus)
    found = course(need, place)
    exposed = [
        None if figures is None else f"{figures.exposed_share:.1%}"
        for figures in (found.own, found.allreduce)
    ]
    assert isinstance(need.task, Planned)
    row = (
        " ".join([task, *settings]), f"{need.held.num_parameters / 1e6:,.0f} M", need.workers,
        f"{need.global_batch:,}", f"{need.config.train.steps:,}", gb(need.num_bytes),
        f"{need.flops:.3g}", f"{found.mfu:g}", f"{found.alone_s:.3g}", found.bound_by, *exposed,
        f"{found.days:.3g}", f"{found.days * need.workers:.3g}", gb(need.held.saved_bytes),
    )  # fmt: skip
    return row, need.task.pace.source


def _planned(words: Sequence[str], place: Place, gpus: int | None) -> Need:
    """On the nearest number of GPUs among which the batch divides."""
    planner = Planner(APP.planned, APP.make_task, words, GPUS[place.gpu].usable_bytes)
    return planner.smallest() if gpus is None else planner.fitting(planner.nearest(gpus))


if __name__ == "__main__":
    program.run(main)
