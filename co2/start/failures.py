"""Telling of a failure once: the worker that meets it first speaks, the others end in silence."""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from co2.start.here import HERE


def is_first(failure: str) -> bool:
    """True for the first worker that reports this failure, by any name that all give to it."""
    store = HERE.store
    if store is None:
        return True
    try:
        store.set_timeout(timedelta(seconds=2))
        store.add("failures", 1)
        return store.add(f"failure/{failure}", 1) == 1
    except dist.DistError:  # it is gone, with whoever held it
        return True


def are_told() -> bool:
    """Whether a worker has reported any."""
    try:
        return HERE.store is not None and HERE.store.add("failures", 0) > 0
    except dist.DistError:
        return False


def tell(line: str, failure: str = "") -> None:
    """Print an error in one line, unless another worker has told of the same `failure`, which has a
    name where its lines differ between the workers."""
    note(line)
    if is_first(failure or line):
        print(line, file=sys.stderr, flush=True)


def note(line: str) -> None:
    """Have torchrun, which started this worker, end its report with this line."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        told = {"py_callstack": line, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": told}}))
