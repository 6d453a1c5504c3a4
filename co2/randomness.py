"""Random generators that a task may draw from: their seeds, and their states in a checkpoint."""

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int, worker: int) -> None:
    """Dropout and the like differ between the workers, and repeat from run to run."""
    own = seed * 1_000_003 + worker
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Inside, if `wanted`, PyTorch takes algorithms with the same bits in every run, and warns of
    operations that have none; memory that it hands out is filled with NaN."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may differ
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        if wanted:
            torch.use_deterministic_algorithms(False)


def random_states() -> dict[str, Any]:
    """The states of every global random generator that a task may draw from."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    states: dict[str, Any] = {
        "python": [version, torch.tensor(numbers), gauss],
        "numpy": [name, torch.tensor([int(key) for key in keys]), *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Go on from what `random_states` returned."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])
