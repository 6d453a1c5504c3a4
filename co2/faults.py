"""Telling of a fault once: the worker that meets it first speaks, and the others end in silence."""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

_store: dist.Store | None = None
"""What the workers of this run share; None where each speaks for itself."""


def share(store: dist.Store | None) -> None:
    """From now on the workers that have this store agree on who speaks."""
    global _store
    _store = store


def is_first(fault: str) -> bool:
    """Whether no worker has asked this yet about the fault, by any name that all give to it."""
    if _store is None:
        return True
    try:
        _store.set_timeout(timedelta(seconds=2))
        _store.add("faults", 1)
        return _store.add(f"fault/{fault}", 1) == 1
    except dist.DistError:  # it is gone, with whoever held it
        return True


def are_told() -> bool:
    """Whether a worker has met any."""
    try:
        return _store is not None and _store.add("faults", 0) > 0
    except dist.DistError:
        return False


def tell(line: str, fault: str = "") -> None:
    """Print an error in one line, unless another worker has told of the same `fault`, which has a
    name where its lines differ between the workers."""
    note(line)
    if is_first(fault or line):
        print(line, file=sys.stderr, flush=True)


def note(line: str) -> None:
    """Have torchrun, which started this worker, end its report with this line."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        told = {"py_callstack": line, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": told}}))
