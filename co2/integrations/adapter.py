"""What the adapters to other trainers share: a method steps, is saved, and goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from co2.atomic import durable
from co2.comm.mesh import Mesh
from co2.errors import require
from co2.methods.base import Method
from co2.methods.shared.guard import sums


class Stepping:
    """The inner optimizer of a method, whose step is the method's."""

    def __init__(self, sync: Method) -> None:
        self._sync = sync

    def step(self, closure: Callable[[], object] | None = None) -> object:
        """The inner step and the synchronization that is due, with the gradients that `closure`
        makes, if there is one. Returns what that returns."""
        made = None if closure is None else closure()
        self._sync.step()
        return made

    # Any: whatever else the optimizer has.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._sync.optimizer, name)


def check_method(sync: object) -> None:
    """Raise `ConfigError` unless it is a method that has prepared nothing yet."""
    kind = type(sync).__name__
    hint = "must be a method, such as co2.CO2(tau=12)"
    require(isinstance(sync, Method), "sync", kind, hint)
    require(not hasattr(sync, "mesh"), "sync", kind, "has prepared a model; give a new one")


def renewed(sync: Method) -> Method:
    """A method with the same configuration that has prepared nothing."""
    return type(sync)(sync.config, sync.comm)


def checksums(module: nn.Module) -> list[int]:
    """Numbers that change with the bits of the parameters and buffers."""
    return sums((*module.parameters(), *module.buffers()))


def file_name(worker: int) -> str:
    """The name of a worker's file in a checkpoint, which `opened` reads."""
    return f"sync_{worker}.pt"


# Any: what torch.save takes.
def put(state: dict[str, Any], mesh: Mesh, folder: Path) -> None:
    """Write a state into this worker's file of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with durable(folder / file_name(mesh.worker)) as file:
        torch.save(state, file)
