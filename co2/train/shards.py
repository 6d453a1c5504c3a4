"""Reading what the workers of a replica have saved together, without trusting it.

torch.distributed.checkpoint describes its files in one that is a pickle, `.metadata`, and reads
values that are no tensors as pickles too. A pickle can name any code to run. Here a description may
be made of the classes below only, its files lie beside it, and values are plain.
"""

import pickle
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

_META = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *((_META, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_META, f"{name}StorageMetadata") for name in ("Bytes", "Chunk", "Tensor")),
    (_META, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *(("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")),  # the latter from Python 3.13 on
}
"""Module and name of what a description is made of, beside PyTorch's data types."""


class Reader(dcp.FileSystemReader):
    """Reads a folder that `torch.distributed.checkpoint.FileSystemWriter` has written."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The description. Raises `pickle.UnpicklingError` if it is none."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise pickle.UnpicklingError("it describes no checkpoint")
        names = {str(place.relative_path) for place in found.storage_data.values()}
        elsewhere = [name for name in names if Path(name).name != name or name in ("", "..")]
        if elsewhere:
            raise pickle.UnpicklingError(f"it names a file elsewhere: {min(elsewhere)}")
        return found


class Planner(DefaultLoadPlanner):
    """Loads values that are no tensors as plain values, into a state without groups."""

    def load_bytes(self, read_item: ReadItem, value: IO[bytes]) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in _KNOWN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint")
