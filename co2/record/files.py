"""Reading the files of a run, which may be damaged or still grow."""

import json
import os
import re
from pathlib import Path
from typing import Any

from co2.errors import ConfigError, first_line

_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
DAMAGE = (*_MISSING, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading a damaged file of JSON or YAML raises. Other errors of the system are none: where a
file cannot be read, it may be sound."""
CHECKPOINT_FORMAT = 8
"""Stands in the manifest of every checkpoint. It grows when older ones can no longer be read."""


def unreadable(path: Path, error: BaseException, reader: str = "") -> ConfigError:
    """The refusal to go on with a run of which a file cannot be read, on the worker `reader`."""
    why = getattr(error, "strerror", None) or first_line(error)
    hint = (
        f"{os.path.relpath(path)} cannot be read{reader} ({why}); it is kept: mend that and give "
        "the same command again, or train afresh with resume=never"
    )
    return ConfigError("resume", "auto", hint)


def saved_steps(checkpoints: Path) -> list[int]:
    """The steps of all checkpoints in a folder, newest first. Raises `ConfigError` where it cannot
    be read."""
    try:
        names = os.listdir(checkpoints)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(checkpoints, error) from None
    steps = (int(name[5:]) for name in names if re.fullmatch("step_[0-9]+", name))
    return sorted(steps, reverse=True)


def whole_lines(path: Path) -> list[Any]:
    """The values of a file of JSON lines, such as metrics.jsonl, without a last line that is not
    complete yet. Empty where there is no file. `Any`: JSON."""
    texts = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(text) for text in texts if text.endswith("\n")]
