"""Where local workers come from: a process that has imported what they need, and forks them.

Python's fork server spends the seconds of importing PyTorch once, for all workers of a run or a
sweep, and for those that an elastic run starts later. It touches no GPU, so that what it forks may.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

SERVER_LOST = "the fork server is gone; the same command goes on from the last checkpoint"
_UNKNOWN = 255
"""The exit status that multiprocessing makes up where the fork server has not told it."""


class ServerLost(Exception):
    """The fork server was killed. Its workers may live; nobody learns how they end."""


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
    """Wait until the fork server has imported everything: a minute where the disk is slow.
    Raises `ServerLost`."""
    process = context.Process(target=int)  # does nothing
    start(process)
    process.join()


def start(process: BaseProcess) -> None:
    """Start a process. Raises `ServerLost`."""
    try:
        process.start()
    except (EOFError, ConnectionError, FileNotFoundError) as error:  # it is gone, or its socket
        raise ServerLost from error


def server_lost(pid: int | None, status: int) -> bool:
    """Whether a process that has ended with this status, says multiprocessing, lives on without the
    fork server."""
    return status == _UNKNOWN and Path(f"/proc/{pid}").exists()


def kill(process: BaseProcess) -> None:
    """SIGKILL, also where multiprocessing takes the process for ended because the fork server is
    gone."""
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


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
