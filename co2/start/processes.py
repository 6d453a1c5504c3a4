"""Local workers: a process that has imported what they need forks them, and this one hands on
signals to them and learns how they end.

Python's fork server spends the seconds of importing PyTorch once, for all workers of a run or a
sweep, and for those that an elastic run starts later. It touches no GPU, so that what it forks may.
"""

import contextlib
import math
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from multiprocessing import connection, forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from co2.errors import ConfigError

LOCAL = "127.0.0.1"
"""Where the workers of this machine meet."""
SERVER_LOST = "the fork server is gone; the same command goes on from the last checkpoint"
_UNKNOWN = 255
"""The exit status that multiprocessing makes up where the fork server has not told it."""
_IMPORTING = -1
"""Number of no worker."""
_LOOK_S = 0.1
"""Between two looks whether a signal has come."""


class ServerLost(Exception):
    """The fork server was killed. Its workers may live; nobody learns how they end."""


_LONGEST = 64
"""Bytes of a folder's path. That of a socket may have 107, and some 30 follow in it."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Signals that ask a run to finish its step, save and exit; a closed terminal sends SIGHUP."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """`STOP_SIGNALS`, without SIGHUP under nohup, which has it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(n for n in STOP_SIGNALS if n != signal.SIGHUP or not ignored)


def context() -> ForkServerContext:
    """Starts processes. The first call starts the fork server, which imports what this process has
    imported of the suite, and what every worker imports as it begins to train. It and what it forks
    block the signals that this thread blocks now."""
    # With it torch.cuda.is_available(), which libraries ask as they are imported, does not start
    # CUDA in the fork server: what that forks could not use a GPU.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    allow_files()
    found = multiprocessing.get_context("forkserver")
    imported = [name for name in sys.modules if name.partition(".")[0] in ("co2", "tasks")]
    found.set_forkserver_preload([*imported, "torch._dynamo", "torch.distributed.checkpoint"])
    place_sockets()
    with _safe_path():
        forkserver.ensure_running()
    return found


def allow_files() -> None:
    """Allow this process, and all that it starts, as many open files as the system lets it have.
    The usual 1,024 are passed at some 300 workers."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


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


class Workers:
    """The workers that this process has started, by their numbers. Used as a context manager it
    hands on signals meanwhile, and kills those that are left at its end.

    The signals are blocked in this process, and so in the workers that it starts, which look for
    them when they train (StopVote). A signal that comes before that waits, and is not lost. They
    are not blocked in threads that libraries have started, such as those of NumPy's BLAS; where the
    system gives a signal to one of these, Python's handler sees it.

    Args:
        signals: to hand on. A second Ctrl-C kills the workers.
    """

    def __init__(self, signals: Iterable[signal.Signals] = ()) -> None:
        self.running: dict[int, BaseProcess] = {}
        self.statuses: dict[int, int] = {}
        """Of those that have ended; of one that a signal has killed, its negative number."""
        self._signals = tuple(signals)
        self._received: list[int] = []
        self._reached = set[tuple[int, int]]()

    def __enter__(self) -> "Workers":
        note = self._received.append
        self._handlers = {
            n: signal.signal(n, lambda number, _: note(number)) for n in self._signals
        }
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        if self._signals:
            # Python's resource tracker must start with them blocked, too; starting it unblocks
            # some here.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        return self

    @cached_property
    def _context(self) -> ForkServerContext:
        """Made for the first worker: the fork server has the environment of then, in which is the
        network that a run on several machines has chosen."""
        return context()

    def __exit__(self, *_: object) -> None:
        self.kill()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    @property
    def told_to_stop(self) -> bool:
        """Whether a signal has come, which is handed on to the workers."""
        return bool(self._received)

    @property
    def told_to_kill(self) -> bool:
        """Whether Ctrl-C has come twice, so that no other worker may be started."""
        return self._received.count(signal.SIGINT) > 1

    def start(self, number: int, target: Callable[..., object], *arguments: object) -> None:
        """Start a worker, which calls `target`. Raises `ServerLost`."""
        process = self._context.Process(target=target, args=arguments)
        try:
            process.start()
        except (EOFError, ConnectionError, FileNotFoundError) as error:  # it is gone, or its socket
            raise ServerLost from error
        self.running[number] = process

    def import_all(self) -> None:
        """Wait until the fork server has imported everything: a minute where the disk is slow.
        Raises `ServerLost`."""
        self.start(_IMPORTING, int)  # does nothing
        self.running.pop(_IMPORTING).join()

    def wait(self, seconds: float = math.inf) -> dict[int, int]:
        """Wait until a worker ends, but not longer than this. Returns the statuses of those that
        have ended, which are not `running` any more. Raises `ServerLost`."""
        until = time.monotonic() + seconds
        while True:
            self._hand_on()
            left = max(0.0, until - time.monotonic())
            sentinels = [process.sentinel for process in self.running.values()]
            if connection.wait(sentinels, min(left, _LOOK_S)) or not left:
                return self._ended()

    def end(self, seconds: float) -> None:
        """Wait until all have ended by themselves, and kill those that have not in this time."""
        until = time.monotonic() + seconds
        while self.running and (left := until - time.monotonic()) > 0:
            self.wait(left)
        self.kill()

    def kill(self, numbers: Iterable[int] | None = None) -> None:
        """End those of these that are running at once; None: all. Also where multiprocessing takes
        them for ended because the fork server is gone."""
        for number in list(self.running) if numbers is None else numbers:
            process = self.running.pop(number, None)
            if process is not None:
                if process.exitcode in (None, _UNKNOWN):
                    _send(process, signal.SIGKILL)
                process.join()
                self.statuses[number] = process.exitcode or 0

    def tell(self, number: int) -> None:
        """Send all a signal that they have not got yet."""
        for worker, process in self.running.items():
            if (worker, number) not in self._reached and process.exitcode is None:
                self._reached.add((worker, number))
                _send(process, number)

    def _hand_on(self) -> None:
        # Not sigtimedwait: stopping and going on (Ctrl-Z, fg) ends it with an arbitrary number.
        if not signal.sigpending().isdisjoint(self._signals):
            self._received.append(signal.sigwait(self._signals))
        if self.told_to_stop:
            self.tell(signal.SIGKILL if self.told_to_kill else self._received[-1])

    def _ended(self) -> dict[int, int]:
        ended = {}
        for number, process in list(self.running.items()):
            status = process.exitcode
            if status is None:
                continue
            if status == _UNKNOWN and Path(f"/proc/{process.pid}").exists():
                raise ServerLost
            ended[number] = status
            del self.running[number]
        self.statuses |= ended
        return ended


def _send(process: BaseProcess, number: int) -> None:
    assert process.pid is not None, "it was started"
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def cores_of_each(workers: int) -> int:
    """How many threads each of so many workers of this machine computes with."""
    return max(1, (os.cpu_count() or 1) // workers)


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
