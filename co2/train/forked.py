"""Where local workers come from: a process that has imported what they need, and forks them.

An interpreter needs some seconds to import PyTorch and the rest. Python's fork server does so once,
for all workers of a run, of the runs of a sweep, and for those that an elastic run starts later. It
does not touch a GPU, so that what it forks may.
"""

import multiprocessing
import sys
from multiprocessing.context import ForkServerContext

_IMPORTED = ("co2", "tasks")
_LATER = ("torch._dynamo", "torch.distributed.checkpoint")
"""What every worker imports as it begins to train."""


def context() -> ForkServerContext:
    """Starts processes; the first one starts the fork server, which imports what this process has
    imported of the suite."""
    found = multiprocessing.get_context("forkserver")
    imported = [name for name in sys.modules if name.partition(".")[0] in _IMPORTED]
    found.set_forkserver_preload([*imported, *_LATER])
    return found


def import_all(context: ForkServerContext) -> None:
    """Wait until the fork server has imported everything, which takes a minute where the disk is
    slow: it answers only then."""
    process = context.Process(target=int)  # does nothing
    process.start()
    process.join()
