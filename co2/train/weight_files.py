"""Files of weights: written, read without running what is in them, and copied into a model."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from co2.errors import ConfigError, require

MODEL = "model.pt"
"""In a run's folder: its final consensus."""
EMA_MODEL = "model_ema.pt"
"""Beside it with train.ema_decay: the mean over the replicas of the weights' moving averages."""
EXPORTED = "model.safetensors"
"""In the folder of an export or of a model of the hub."""

_MENDS = {".pt": "train that run again", ".safetensors": "export it or download it again"}


def write(file: IO[bytes], values: Any) -> None:
    """`torch.save`. Raises `OSError` where there is no room, of which torch makes a `RuntimeError`.
    Any: whatever can be loaded without a pickle."""
    try:
        torch.save(values, file)
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OSError):
                raise cause from None
            cause = cause.__context__
        raise


def save(path: Path, tensors: Mapping[str, Tensor], head: Mapping[str, str]) -> None:
    """Write a file of safetensors, and fsync it.

    Args:
        tensors: by name, no two in the same memory.
        head: texts that stand before them.
    Raises:
        OSError: there is no room.
    """
    from safetensors import SafetensorError  # not needed by the library
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file({name: one.contiguous() for name, one in tensors.items()}, path, {**head})
    except SafetensorError as error:  # a full disk, which is no OSError there
        raise OSError(errno.EIO, str(error), str(path)) from None
    path.chmod(mode)  # safetensors lets only the owner read it
    with path.open("rb") as file:
        os.fsync(file.fileno())


def read(path: Path, key: str, value: str) -> dict[str, Tensor]:
    """Return the weights in a file by name, memory-mapped.

    Args:
        path: `model.pt` of a run, or a file of safetensors.
        key, value: of the configuration or the command line, for errors.
    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    mend = _MENDS[path.suffix]
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file  # not needed by the library

            saved = load_file(path)
        else:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch, pickle and safetensors raise many kinds
        hint = f"{path.name} cannot be read ({type(error).__name__}); {mend}"
        raise ConfigError(key, value, hint) from None
    good = isinstance(saved, dict) and all(isinstance(part, Tensor) for part in saved.values())
    require(good, key, value, f"{path.name} holds no weights by name; {mend}")
    return {str(name): weight for name, weight in saved.items()}


def copy(
    module: nn.Module,
    saved: Mapping[str, Tensor],
    key: str,
    value: str,
    file: str,
    heads: tuple[str, ...] = (),
) -> None:
    """Copy weights into a module. On the device "meta" it only checks that they fit.

    Args:
        module: whose parameters and buffers get them.
        saved: by name, with the same shapes. A tied parameter needs one of its names.
        key, value, file: for errors.
        heads: prefixes of names that either side may lack.
    Raises:
        ConfigError: names or shapes differ, or a weight is not finite.
    """
    own = module.state_dict()
    several = {name: saved[first] for name, first in ties(module).items() if first in saved}
    whole = {**several, **saved}
    for name in dict.fromkeys((*own, *whole)):
        there, here = (_shape(weights.get(name)) for weights in (whole, own))
        if there == here:
            hint = f"{file} has a weight that is not finite, in {name}; give a run that has learned"
            require(bool(whole[name].isfinite().all()), key, value, hint)
            own[name].copy_(whole[name])
        elif not name.startswith(heads):
            hint = f"{name} has the shape {there} there and {here} here; give this run that model"
            raise ConfigError(key, value, hint)


def ties(module: nn.Module) -> dict[str, str]:
    """Every further name of a parameter that has several, with its first one."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    names = {name: first.setdefault(id(parameter), name) for name, parameter in named}
    return {name: kept for name, kept in names.items() if name != kept}


def _shape(weight: Tensor | None) -> str:
    return "none" if weight is None else f"({', '.join(map(str, weight.shape))})"
