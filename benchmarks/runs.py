"""Runs of train.py whose summaries a benchmark puts into its table."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_dir

import train as entry
from co2.record import read_summary


def summary_of(overrides: Sequence[str], train: bool = True) -> dict[str, Any] | None:
    """The summary of the run with these overrides; a finished one is not made again.

    Where there is none, it is made now, or None if not to `train`.

    Raises:
        ConfigError: `train.py` would refuse it.
    """
    given = list(overrides)
    with initialize_config_dir(config_dir=str(entry.CONF), version_base="1.3"):
        config = entry.validate(compose("config", given), given)
    if train and read_summary(config) is None:
        command = [sys.executable, "train.py", *given]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read_summary(config)
