"""Where local workers come from: a process that has imported what they need, and forks them.

Python's fork server spends the seconds of importing PyTorch once, for all workers of a run or a
sweep, and for those that an elastic run starts later. It touches no GPU, so that what it forks may.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from co2.errors import ConfigError

SERVER_LOST = "the fork server is gone; the same command goes on from the last checkpoint"
_UNKNOWN = 255
"""The exit status that multiprocessing makes up where the fork server has not told it."""


class ServerLost(Exception):
    """The fork server was killed. Its workers may live; nobody learns how they end."""


_LONGEST = 64
"""Bytes of a folder's path. That of a socket may have 107, and some 30 follow in it."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Signals that ask a run to finish its step, save and exit; a closed terminal sends SIGHUP."""


def context() -> ForkServerContext:
    """Starts processes. The first call starts the fork server, which imports what this process has
    imported of the suite, and what every worker imports as it begins to train. It and what it forks
    block the signals that this thread blocks now."""
    # With it torch.cuda.is_available(), which libraries ask as they are imported, does not start
    # CUDA in the fork server: what that forks could not use a GPU.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    found = multiprocessing.get_context("forkserver")
    imported = [name for name in sys.modules if name.partition(".")[0] in ("co2", "tasks")]
    found.set_forkserver_preload([*imported, "torch._dynamo", "torch.distributed.checkpoint"])
    place_sockets()
    with _safe_path():
        forkserver.ensure_running()
    return found


def place_sockets() -> None:
    """Choose the folder in which multiprocessing has its sockets, for this process and all that it
    starts: a new one in that of temporary files, or in a shorter one if that is too long.

    Raises:
        ConfigError: there is none in which files can be made.
    """
    given = os.environ.get("TMPDIR", "/tmp")
    try:
        found = tempfile.gettempdir()
        if len(os.fsencode(found)) > _LONGEST:
            tempfile.tempdir = "/tmp"
        try:
            util.get_temp_dir()
        finally:
            tempfile.tempdir = found
    except OSError as error:
        reason = f"no socket can be made there ({error.strerror or error}); "
        hint = f"{reason}set TMPDIR to a folder of at most {_LONGEST} bytes that can be written"
        raise ConfigError("TMPDIR", given, hint) from None


@contextmanager
def _safe_path() -> Iterator[None]:
    """Inside, a `python -c` that is started imports nothing from the current folder. A library may
    not decide so for all that the user's program starts; see `program.safe_path`."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


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


@contextmanager
def forking_helpers() -> Iterator[None]:
    """Inside, processes are forked that call `help_starter`. They begin with stop signals blocked,
    and so do threads that a library starts in them as they are forked, as Arrow does: one where a
    signal is not blocked would let it end the process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def help_starter() -> None:
    """From now on this process ends with the one that has forked it, or when that terminates it.
    A stop signal, which may reach all processes of a run, does not end it: the run needs it until
    it has saved. It was forked inside `forking_helpers`."""
    starter = os.getppid()

    def wait() -> None:
        while signal.sigwaitinfo((signal.SIGTERM,)).si_pid != starter:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
    end_with_starter()
