"""Where Triton's kernels replace PyTorch's operations."""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from torch import Tensor


def kernels(x: Tensor) -> ModuleType | None:
    """Return co2/comm/kernels.py for a vector on CUDA, and under Triton's interpreter for any; None
    where PyTorch has to do, also because Triton is not installed."""
    return _kernels() if x.is_cuda or _interpreted() else None


@cache
def _kernels() -> ModuleType | None:
    # Imported late: `import co2` needs torch and numpy only.
    return import_module("co2.comm.kernels") if find_spec("triton") else None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
