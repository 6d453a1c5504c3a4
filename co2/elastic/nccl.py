"""Giving up what NCCL carries for members of which one is lost.

A kernel of NCCL's waits on the GPU for as long as the others need, and with it the stream that it
is on. Aborting its communicator ends it. No error is raised then, and what it leaves in its buffer
means nothing: whoever waits for it has to ask whether it was aborted (`Sockets.were_cut`).

Of the threads that PyTorch runs beside NCCL none must act on an error of its own, because that ends
the process; `expect_losses` says so to them.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_CUDA = torch.device("cuda")


def expect_losses() -> None:
    """Leave it to the members to find out who is lost. Before the first group is made."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"


def backends(groups: Iterable[dist.ProcessGroup]) -> list[Any]:
    """NCCL's parts of process groups. Any: PyTorch gives them no common type."""
    # At one moment, because the thread that trains may be making another.
    found = [group for group in tuple(groups) if "nccl" in dist.get_backend_config(group)]
    return [group._get_backend(_CUDA) for group in found]


def abort(found: Sequence[Any]) -> None:
    """End all that is under way on `backends`. Any thread may call it."""
    if not found:
        return
    # As one: the memory of an aborted communicator is freed when the device stands still, which the
    # kernel of another one may prevent.
    found[0]._group_start()
    try:
        for backend in found:
            backend.abort()
    finally:
        found[0]._group_end()
