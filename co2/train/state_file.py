"""A worker's state: copied while training goes on, and as one file, which other tools read too.

The tensors lie in a file of safetensors. They have the names that torch.distributed.checkpoint
would give them: `model.<parameter>`, `optimizer.state.<parameter>.<field>`. All other values are
JSON in the head of the file, where `{"$tensor": name}` stands for a tensor. There is no pickle:
reading a file runs nothing.

The files of a replica's workers in one folder are a checkpoint for PyTorch's
`HuggingFaceStorageReader`, because the head of each says where its shards begin in the whole
tensors. What every worker has for itself is called `worker_<n>.<name>`, and `<name>` for the first
one: buffers, the method's state, random generators.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from co2.comm.background_mean import Arriving
from co2.comm.collectives import local
from co2.streams import SideStream
from co2.train import weight_files

REPLICA = "replica"
"""In a state: key of what the workers of a replica hold together."""
METHOD = "method"
"""In a state: key of what a method holds."""
_VALUES, _SHARDS = "co2", "DCP_SHARDING_INFO"
_TENSOR, _ENTRIES = "$tensor", "$entries"

ELSEWHERE: Final = object()
"""In a state: a tensor that another worker of the replica saves under the same name."""


@dataclass(frozen=True)
class Split:
    """A state, divided into tensors and what JSON can say."""

    values: dict[str, Any] = field(default_factory=dict)
    """The state with names in place of tensors. `Any`: plain values, lists and dicts of them."""
    tensors: dict[str, Tensor | Arriving] = field(default_factory=dict)
    """What this worker holds of each, by name. A tensor that stands in the state twice, as tied
    weights do, is here once."""
    offsets: dict[str, list[int]] = field(default_factory=dict)
    """Where in the whole tensor this part of it begins, by name."""
    _names: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def _of(self, value: Any, path: tuple[str, ...]) -> Any:
        if value is ELSEWHERE:
            return {_TENSOR: ".".join(path)}
        if isinstance(value, Tensor | Arriving):
            return {_TENSOR: self._named(value, ".".join(path))}
        if isinstance(value, Mapping):
            entries = {key: self._of(entry, (*path, str(key))) for key, entry in value.items()}
            whole = all(isinstance(key, str) for key in entries)
            return entries if whole else {_ENTRIES: [[*entry] for entry in entries.items()]}
        if isinstance(value, list | tuple):
            return [self._of(entry, (*path, str(n))) for n, entry in enumerate(value)]
        return value

    def _named(self, value: Tensor | Arriving, name: str) -> str:
        tensor = value.buffer if isinstance(value, Arriving) else value.detach()
        part = local(tensor)
        place = (part.device, part.data_ptr(), part.dtype, part.shape, part.stride())
        first = self._names.setdefault(place, name)
        if first == name:
            assert name not in self.tensors, f"two tensors of a state are called {name}"
            self.tensors[name] = value if isinstance(value, Arriving) else part
            self.offsets[name] = [0] * part.dim()
            if part is not tensor:
                shard: Any = tensor  # a DTensor, whose module takes half a second to import
                (chunk,) = shard.__create_chunk_list__()
                self.offsets[name] = list(chunk.offsets)
        return first


def split(state: Mapping[str, Any], worker: int) -> Split:
    """Divide the state of the worker with this number in its replica: nested dicts, lists and
    tuples of tensors and plain values. Tuples become lists. What stands under `REPLICA` is named
    without the worker."""
    found, own = Split(), () if worker == 0 else (f"worker_{worker}",)
    for key, value in state.items():
        found.values[key] = found._of(value, () if key == REPLICA else (*own, key))
    return found


def rebuilt(values: Any, tensor: Callable[[str], Tensor | None]) -> Any:
    """The state whose `Split.values` these are; `tensor` returns the tensor of a name."""
    if isinstance(values, list):
        return [rebuilt(entry, tensor) for entry in values]
    if not isinstance(values, dict):
        return values
    if _TENSOR in values:
        return tensor(values[_TENSOR])
    entries = values.get(_ENTRIES, values.items())
    return {key: rebuilt(entry, tensor) for key, entry in entries}


def not_finite(state: Mapping[str, Any]) -> str:
    """The name of a tensor in the host's memory that is not finite, of weights, inner state and
    what the method holds; empty if all are. A buffer, such as a mask, may be infinite."""
    held = {"": state.get(REPLICA), METHOD: state.get(METHOD)}
    for name, tensor in _tensors(held, ""):
        # aminmax reads the tensor once; isfinite makes copies and takes fifteen times as long.
        fractions = tensor.is_floating_point() and tensor.numel() > 0
        if fractions and not all(map(torch.isfinite, tensor.aminmax())):
            return name
    return ""


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries:
            yield from _tensors(entry, f"{name}.{key}".strip("."))


class HostCopy:
    """Copies one set of tensors after another, all into the same memory: the copy before is
    overwritten.

    The memory is as much as the tensors, and pinned for those of a GPU. They are copied on a stream
    of their own, beside a forward and a backward pass, until `hold`.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._waits: list[Callable[[], object]] = []
        self._side: SideStream | None = None
        self._sources: list[Tensor] = []
        """What a GPU still copies: nobody else may get its memory."""
        self._copied: torch.cuda.Event | None = None

    def take(self, tensors: Mapping[str, Tensor | Arriving]) -> dict[str, Tensor]:
        """Return copies of tensors by name, complete once `wait` has returned. Call `hold` before a
        tensor of a GPU changes. An `Arriving` one is copied once it has arrived."""
        arriving = {name: one for name, one in tensors.items() if isinstance(one, Arriving)}
        there = {name: one for name, one in tensors.items() if isinstance(one, Tensor)}
        taken = {name: self._target(name, one) for name, one in there.items()}
        self._sources = list(there.values())
        if self._side is None and any(source.is_cuda for source in self._sources):
            self._side = SideStream()
        if taken and self._side is not None:
            self._side.after_compute()
            self._copied = self._side.copy(list(taken.values()), self._sources)
        elif taken:
            torch._foreach_copy_(list(taken.values()), self._sources)
        late = {name: self._target(name, one.buffer) for name, one in arriving.items()}
        self._waits = [one.copy_to(late[name]) for name, one in arriving.items()]
        return taken | late

    def hold(self) -> None:
        """Call it before anything changes a tensor. A GPU then finishes copying first; the host
        goes on."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None

    def wait(self) -> None:
        """Wait until the copy is whole. Any thread may call it. Raises `RuntimeError` if what was
        arriving has not arrived well."""
        if self._side is not None:
            self._side.synchronize()
        self._sources = []
        errors = []
        for wait in self._waits:  # all of them: the memory is used again afterwards
            try:
                wait()
            except RuntimeError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _target(self, name: str, tensor: Tensor) -> Tensor:
        held = self._held.get(name)
        kind = tensor.shape, tensor.stride(), tensor.dtype
        if held is None or (held.shape, held.stride(), held.dtype) != kind:
            held = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._held[name] = held
        return held


def write(path: Path, state: Split, tensors: Mapping[str, Tensor]) -> None:
    """Write a state, with copies of its tensors in the host's memory, by name. Raises `OSError`
    where there is no room."""
    shards = {name: {"saved_offsets": offsets} for name, offsets in state.offsets.items()}
    head = {_VALUES: json.dumps(state.values), _SHARDS: json.dumps(shards)}
    weight_files.save(path, tensors, head)


def read(path: Path, others: Sequence[Path] = ()) -> Any:
    """Return the state in a file, in the host's memory. The files of the `others` of the replica
    hold the tensors that it names and does not hold. Raises errors of many kinds."""
    from safetensors import safe_open  # not needed by the library

    paths = (path, *others)
    with ExitStack() as stack:
        for one in paths:  # safetensors takes a file that it may not open for a missing one
            one.open("rb").close()
        files = [stack.enter_context(safe_open(one, "pt")) for one in paths]
        places = {name: file for file in reversed(files) for name in file.keys()}  # noqa: SIM118
        values = json.loads(files[0].metadata()[_VALUES])
        return rebuilt(values, cache(lambda name: places[name].get_tensor(name)))
