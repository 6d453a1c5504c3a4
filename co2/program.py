"""What every program of the suite does around its work: how it starts, prints and ends.

Older Pythons than the suite's, without any package, can run it: it says which Python has them.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import NoReturn

    from _typeshed import ReadableBuffer

OLDEST = (3, 11)
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells tell it."""
_GONE = frozenset((errno.EPIPE, errno.EIO, errno.ECONNRESET))
NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""What a full disk, a quota, and a limit on the size of files say."""
_OURS = ("benchmarks", "co2", "co2_measure", "recipes", "tasks", "train")
_ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def starting(name: str, slow: bool = True) -> Iterator[None]:
    """Around the imports of the module that Python runs, and of a package on `python -m`'s way to
    it. A Python that is too old or lacks a package ends with one line, and Ctrl-C without any. What
    the program starts imports nothing from where the user stands (`safe_path`).

    Args:
        name: the module's `__name__`. In others than these nothing is done.
        slow: PyTorch is among them, so that they take seconds and a line tells of them.
    """
    if name != "__main__" and sys.argv[:1] != ["-m"]:
        yield
        return
    safe_path()
    if sys.version_info < OLDEST:
        version, oldest = (".".join(map(str, v[:2])) for v in (sys.version_info, OLDEST))
        _refuse(f"this is Python {version}, and {oldest} or newer is needed")
    # PyTorch's own; it warns in pages where a worker or a store has gone, of which a line tells.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        if not Path().exists():
            why = "this folder has been removed; change to another"
            raise FileNotFoundError(errno.ENOENT, why, ".")
        if slow and "torch" not in sys.modules:
            for package in ("torch", "hydra"):
                if find_spec(package) is None:
                    raise ModuleNotFoundError(name=package)
            if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
                with contextlib.suppress(OSError):  # it may be full, or closed
                    print("importing PyTorch takes some seconds", file=sys.stderr, flush=True)
        yield
    except ModuleNotFoundError as error:
        _refuse_without(error)
    except Exception as error:
        sys.exit(_refused_by_the_machine(error))
    finally:
        signal.signal(signal.SIGINT, handler)


def safe_path() -> None:
    """From now on the Pythons that this process starts find the suite, and import nothing from the
    current folder: a `numpy/` or `tasks/` there is the user's, and `python -c` would run it."""
    os.environ["PYTHONSAFEPATH"] = "1"
    # Then a script's own folder is not looked in either, and the suite need not be installed.
    if (_ROOT / "pyproject.toml").exists():
        others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = dict.fromkeys([str(_ROOT), *filter(None, others)])
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def run(main: Callable[[], int]) -> NoReturn:
    """End this process with the status of `main()`: without a traceback where a person has pressed
    Ctrl-C, a package is missing, nobody reads what is printed any more or the machine fails."""
    keep_output()
    try:
        status = main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next one ends it at once
        status = INTERRUPTED
    except ModuleNotFoundError as error:
        _refuse_without(error)
    except Exception as error:
        status = _refused_by_the_machine(error)
    sys.exit(status)


def keep_output(training: bool = False) -> None:
    """From now on a closed terminal, a pipe without a reader and, in `training`, a full disk do not
    end this process. Every line reaches its file in one piece: those of several processes do not
    mix."""
    if training:
        _Lasting.ignored |= NO_ROOM
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started this process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = io.BufferedWriter(_Lasting(stream.fileno(), "wb", closefd=False))
            # What the encoding lacks is spelt out, as Python does for stderr.
            kept = io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True)
            setattr(sys, name, kept)


class _Lasting(io.FileIO):
    """A file that may cease to take what is printed, which is lost then."""

    ignored = _GONE

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in self.ignored:
                error.filename = {1: "stdout", 2: "stderr"}.get(self.fileno())
                raise
            return memoryview(data).nbytes


def python() -> str:
    """The Python that runs this, as a command line of the current folder has it."""
    import shutil  # slow: until `starting`, Ctrl-C ends in a traceback

    path = Path(sys.executable)
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return "python" if shutil.which("python") == sys.executable else str(path)


def version() -> str:
    """The suite's own, for `--version`."""
    from importlib import metadata  # which the oldest Pythons lack

    try:
        return f"co2-suite {metadata.version('co2-suite')}"
    except metadata.PackageNotFoundError:
        return "co2-suite, not installed"


def _refused_by_the_machine(error: Exception) -> int:
    """Say why the machine cannot run this. Returns the exit status; raises a bug."""
    from co2.errors import REFUSED, from_outside

    line = from_outside(error)
    if line is None:
        raise error
    keep_output(training=True)  # it may be the output that has no room
    print(f"error: {line}", file=sys.stderr, flush=True)
    return REFUSED


def _refuse_without(error: ModuleNotFoundError) -> NoReturn:
    """Say which package is missing. One of our own is a bug, which is raised."""
    package = (error.name or "").partition(".")[0]
    if package in _OURS:
        raise error
    _refuse(f"{package} is missing in {sys.executable}")


def _refuse(reason: str) -> NoReturn:
    own = _ROOT / ".venv" / "bin" / "python"
    if own.exists() and str(own) != sys.executable:
        with contextlib.suppress(ValueError):
            own = own.relative_to(Path.cwd())
        hint = f"use {own}"
    elif (_ROOT / "Makefile").exists():
        hint = (
            "`make train` installs everything into .venv; or: python -m pip install -e '.[suite]'"
        )
    else:
        hint = "python -m pip install 'co2-suite[suite]'"
    print(f"error: {reason}; {hint}", file=sys.stderr, flush=True)
    sys.exit(2)
