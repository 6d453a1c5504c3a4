"""The command `co2`: trains, measures and draws from any folder.

Each sub-command is a module with a command line of its own, which takes this process's place. So
this file imports none of them, and the library does not depend on tasks or recipes.
"""

import os
import sys
from collections.abc import Sequence

from co2 import program

with program.starting(__name__, slow=False):
    from co2.errors import REFUSED, nearest

COMMANDS = {
    "train": ("train", "one run, or with -m a sweep: co2 train task=gpt2 method=co2 co2.tau=12"),
    "plan": ("train plan", "what a run would take, without a GPU or data: memory, days, disk"),
    "probe": ("train probe", "what each method would wait for here: measured in half a minute"),
    "sample": ("train sample", 'text from a run of a language model: co2 sample RUN "def "'),
    "export": ("train export", "a run's weights in the form that other libraries read"),
    "recipes": ("recipes", "the runs of a table or figure: run, collect and render them"),
    "lab": ("co2_measure.lab", "trainings on real slow links on this machine; needs root"),
    "simulate": ("co2_measure.simulate", "what a cluster would do, from a model of its network"),
    "compare": ("co2.record.compare", "two runs side by side: settings, losses, final figures"),
    "metrics": ("co2.record.curves", "metrics of runs side by side: as CSV, or drawn with --plot"),
    "timeline": ("co2.record.timeline", "a picture of who computes and who waits, from traces"),
    "prepare": ("tasks.prepare", "the data of all scales but smoke"),
    "wandb-sync": ("co2.record.wandb_sync", "send offline W&B runs"),
}
"""Sub-command → module that it runs and that module's first arguments, and what it is for."""


def usage() -> str:
    """The help text: every sub-command in a line."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {purpose}" for name, (_, purpose) in COMMANDS.items()]
    head = ["usage: co2 COMMAND [ARGUMENT ...]", "", __doc__.splitlines()[0], ""]
    return "\n".join([*head, *lines, "", "co2 COMMAND --help tells more about each."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command in this process's place. Returns only where there is none to run."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else REFUSED
    if arguments[0] == "--version":
        print(program.version())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"error: co2 {name}: no such command; {nearest(name, COMMANDS)}", file=sys.stderr)
        return REFUSED
    program.safe_path()  # a train.py or a folder tasks/ in the current folder is not ours
    os.execv(sys.executable, [sys.executable, "-m", *COMMANDS[name][0].split(), *rest])


if __name__ == "__main__":
    program.run(main)
