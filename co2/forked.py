"""Where local workers come from: a process that has imported what they need, and forks them.

Python's fork server spends the seconds of importing PyTorch once, for all workers of a run or a
sweep, and for those that an elastic run starts later. It touches no GPU, so that what it forks may.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.context import ForkServerContext

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Signals that ask a run to finish its step, save and exit; a closed terminal sends SIGHUP."""


def context() -> ForkServerContext:
    """Starts processes; the first one starts the fork server, which imports what this process has
    imported of the suite, and what every worker imports as it begins to train."""
    # With it torch.cuda.is_available(), which libraries ask as they are imported, does not start
    # CUDA in the fork server: what that forks could not use a GPU.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    found = multiprocessing.get_context("forkserver")
    imported = [name for name in sys.modules if name.partition(".")[0] in ("co2", "tasks")]
    found.set_forkserver_preload([*imported, "torch._dynamo", "torch.distributed.checkpoint"])
    return found


def import_all(context: ForkServerContext) -> None:
    """Wait until the fork server has imported everything: a minute where the disk is slow."""
    process = context.Process(target=int)  # does nothing
    process.start()
    process.join()


def end_with_starter(grace_s: float = 0.0) -> None:
    """From now on this worker ends `grace_s` seconds after the process that started it has ended.

    PR_SET_PDEATHSIG would not do: the kernel takes the fork server for the parent, which lives as
    long as its workers.
    """
    starter = multiprocessing.parent_process()
    assert starter is not None, "multiprocessing has started this worker"

    def wait() -> None:
        starter.join()
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def help_starter() -> None:
    """From now on this process ends with the one that has forked it, or when that terminates it.
    A stop signal, which may reach all processes of a run, does not end it: the run needs it until
    it has saved."""
    starter = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def wait() -> None:
        while signal.sigwaitinfo((signal.SIGTERM,)).si_pid != starter:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
    end_with_starter()
