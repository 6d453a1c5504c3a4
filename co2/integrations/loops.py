"""What a method does for the loop of another library: it steps, is saved and read, and ends."""

from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from co2.atomic import durable
from co2.comm.mesh import Mesh
from co2.errors import ConfigError, require
from co2.methods.base import Method
from co2.methods.parts.guard import sums
from co2.methods.parts.saved import check_held, held, load_held

__all__ = ["held"]


def _load(path: str) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


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
    """The name of a worker's file in a checkpoint."""
    return f"sync_{worker}.pt"


def write(sync: Method, module: nn.Module, folder: Path) -> None:
    """Write what this replica needs to go on exactly into its own file of a folder. Collective."""
    put(held(sync, module), sync.mesh, folder)


# Any: what torch.save takes.
def put(state: dict[str, Any], mesh: Mesh, folder: Path) -> None:
    """Write a state into this worker's file of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with durable(folder / file_name(mesh.worker)) as file:
        torch.save(state, file)


def read(
    sync: Method,
    module: nn.Module,
    folder: Path | str,
    key: str,
    load: Callable[[str], Any] = _load,
    step: int | None = None,
) -> None:
    """Go on from what was written of `held`, after `prepare`. See `opened`."""
    load_held(sync, module, opened(sync, folder, key, load, step))


def opened(
    sync: Method,
    folder: Path | str,
    key: str,
    load: Callable[[str], Any] = _load,
    step: int | None = None,
) -> dict[str, Any]:
    """Return what this worker wrote into its file of a folder, after `prepare`.

    Args:
        key: the name of the checkpoint's argument, for errors.
        load: reads a file; by default from the local disk.
        step: that of the checkpoint. None: it is not compared.
    Raises:
        ConfigError: the file is missing or damaged, or of another number of replicas, step or
            method.
    """
    name = file_name(sync.mesh.worker)
    try:
        state: dict[str, Any] = load(f"{folder}/{name}")
    except FileNotFoundError:
        hint = f"there is no {name}; give a checkpoint of this method and as many processes"
        raise ConfigError(key, folder, hint) from None
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        hint = f"{name} cannot be read ({type(error).__name__}); give an older checkpoint"
        raise ConfigError(key, folder, hint) from None
    then = state.get("step", step)
    hint = f"{name} is of step {then}, the checkpoint of step {step}; give an older checkpoint"
    require(step is None or then == step, key, folder, hint)
    check_held(sync, state, key, folder)
    return state
