"""The errors that a user meets, each in one line that says what would be right; exit statuses."""

import difflib
import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

REFUSED = 2
"""Exit status of a run that was refused, nearly always before it started."""
PREEMPTED = 75
"""Exit status of a run that a signal stopped, and that saved: it can go on (EX_TEMPFAIL)."""
DIVERGED = 65
"""Exit status of a run whose loss or weights are not finite (EX_DATAERR)."""
STOPPED = (PREEMPTED, 130)
"""Exit statuses of a run that a signal stopped: saved, or killed by a second Ctrl-C."""


class ConfigError(ValueError):
    """A value that no run can have. As a text it is one line: `key=value: hint`.

    Args:
        key: the value's full name in the configuration; inside a schema, without its node.
        value: as it was given.
        hint: what would be right.
    """

    def __init__(self, key: str, value: object, hint: str) -> None:
        super().__init__(key, value, hint)
        self.key, self.value, self.hint = key, value, hint

    def __str__(self) -> str:
        return printable(f"{self.key}={self.value}: {self.hint}")

    def under(self, node: str) -> "ConfigError":
        """The same error for the key of a node: `tau` under `co2` is `co2.tau`."""
        return ConfigError(f"{node}.{self.key}", self.value, self.hint)


class WrongCall(Exception):
    """A call that a method cannot serve as it is, or what was done behind its back. As a text it is
    one line: what is wrong, and what to do."""


class WorkerLost(RuntimeError):
    """Another worker has gone, or gives no answer."""


class ReplicasDiffer(Exception):
    """What must be equal on all replicas is not: that of `others` differs from that of most, such
    as `usual`. It is no `RuntimeError`, after which an elastic run would try again.

    Args:
        why: the likely causes, and what to do.
    """

    def __init__(self, name: str, others: Sequence[int], usual: int, why: str) -> None:
        super().__init__(name, others, usual, why)

    def __str__(self) -> str:
        name, others, usual, why = self.args
        who = f"replica{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
        return printable(
            f"{name} of {who} differs from that of replica {usual}, and must be equal on all: {why}"
        )


def unusable(error: OSError) -> ConfigError:
    """The refusal of a file that cannot be used. An error that names no file is raised again."""
    if error.filename is None:
        raise error
    ask = ", or ask its owner for access" if isinstance(error, PermissionError) else ""
    return ConfigError("file", error.filename, f"{error.strerror}; choose another{ask}")


_OUTSIDE = {
    r"DataLoader worker .*(killed by signal: [\w ]+|exited unexpectedly)": (
        "if memory is short, use fewer data.workers; the same command goes on"
    ),
    r"No space left on device|Disk quota exceeded|File too large": (
        "make room, and the same command goes on from the last checkpoint"
    ),
    r"Too many open files": "raise their limit: ulimit -n 65536",
    r"can't start new thread|Resource temporarily unavailable": (
        "raise the limit of processes (ulimit -u) or of memory (ulimit -v), or the container's"
    ),
    r"CUDA (error: )?out of memory": (
        "use a smaller train.batch_size, or train.checkpoint_activations=true"
    ),
    r"Cannot allocate memory|not enough memory[^.]*|bad_alloc|MemoryError|failed to map segment": (
        "use fewer launch.workers or a smaller train.batch_size, or raise ulimit -v"
    ),
    r"port: \d+,.* EADDRINUSE|Address already in use": (
        "another process has this port; set another MASTER_PORT"
    ),
    r"Unable to find (address|interface).*": (
        "name a network of this machine in GLOO_SOCKET_IFNAME, such as lo or eth0, or unset it"
    ),
    r"addresses of .* cannot be retrieved.*": (
        "set MASTER_ADDR to a name or an address of the first machine"
    ),
    r"client socket has timed out.*|Timed out .*waiting for clients.*": (
        "start all workers, and see that MASTER_ADDR and MASTER_PORT can be reached"
    ),
}
"""Pattern of what the system, or PyTorch after it, says → what to do. PyTorch has no types for
these errors, and the system few."""


def from_outside(error: BaseException, who: str = "") -> str | None:
    """What of the machine, and not of the program, has ended it, and what to do, in one line; None
    for a bug.

    Args:
        who: whom it has ended, told where the error names no file.
    """
    text, where, reason = " ".join(f"{type(error).__name__}: {error}".split()), who, None
    if isinstance(error, OSError):
        reason = error.strerror
        where = who if error.filename is None else os.fsdecode(error.filename)
    for pattern, mend in _OUTSIDE.items():
        if found := re.search(pattern, text):
            reason = f"{found.group()}; {mend}"
            break
    line = ": ".join(filter(None, (where, reason)))
    return None if reason is None else printable(line)


def extra(name: str) -> str:
    """The hint of a value that needs an optional extra of pyproject.toml."""
    where = f"pip install -e '.[{name}]', or 'co2-suite[{name}]' outside a clone"
    return f"needs an extra: {where}"


def exit_at_once(status: int) -> NoReturn:
    """End this process, whatever its threads and process groups wait for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def require(condition: bool, key: str, value: object, hint: str) -> None:
    """Raise `ConfigError(key, value, hint)` unless `condition` holds."""
    if not condition:
        raise ConfigError(key, value, hint)


def require_number(key: str, value: float, low: float, hint: str) -> None:
    """Raise `ConfigError` unless `value` is finite and at least `low`."""
    require(math.isfinite(value) and value >= low, key, value, hint)


def require_count(key: str, value: int) -> None:
    """Raise `ConfigError` unless `value` is a whole number of 1 or more."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole and value >= 1, key, value, "must be a whole number, 1 or more")


def is_utf8(text: str) -> bool:
    """Whether a text of the command line was UTF-8: Python has half characters for other bytes."""
    return re.search("[\ud800-\udfff]", text) is None


def printable(text: str) -> str:
    """A text in one line, which no terminal acts upon: control characters are spelt out."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def first_line(error: BaseException) -> str:
    """What an error says in its first line; the name of its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that offers the known name nearest to `name`, or all of them where none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"
