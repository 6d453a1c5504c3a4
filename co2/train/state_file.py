"""A worker's state: copied while training goes on, and as one file, which other tools read too.

The tensors lie in a file of safetensors. They have the names that torch.distributed.checkpoint
would give them: `model.<parameter>`, `optimizer.state.<parameter>.<field>`. All other values are
JSON in the head of the file, where `{"$tensor": name}` stands for a tensor. There is no pickle:
reading a file runs nothing.

The files of a replica's workers in one folder are a checkpoint for PyTorch's
`HuggingFaceStorageReader`, because the head of each says where its shards begin in the whole
tensors. What every worker has for itself is called `worker_<n>.<name>`, and `<name>` for the first
one: buffers, the method's state, random generators.

What is equal on all replicas lies in further files, each part of it once: these tensors are laid
end to end and cut into as many parts of as many bytes as there are replicas, between two rows.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from co2.comm.background_mean import Arriving
from co2.comm.collectives import local
from co2.streams import SideStream
from co2.train import weight_files
from co2.train.layout import Layout, begins, dealt_anew, num_rows

REPLICA = "replica"
"""In a state: key of what the workers of a replica hold together."""
METHOD = "method"
"""In a state: key of what a method holds."""
LAYOUT = "layout"
"""In a state: key of the rows that a worker holds."""
_VALUES, _SHARDS = "co2", "DCP_SHARDING_INFO"
_TENSOR, _ENTRIES = "$tensor", "$entries"

ELSEWHERE: Final = object()
"""In a state: a tensor that another worker of the replica saves under the same name."""


@dataclass(frozen=True)
class Equal:
    """In a state: a tensor that has the same bits on all replicas."""

    tensor: Tensor | Arriving


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
    equal: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of those that are equal on all replicas: the first row that this worker writes of what it
    holds, and how many rows it holds. They lie in a file of their own."""
    _names: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def _of(self, value: Any, path: tuple[str, ...]) -> Any:
        if value is ELSEWHERE:
            return {_TENSOR: ".".join(path)}
        if isinstance(value, Tensor | Arriving | Equal):
            return {_TENSOR: self._named(value, ".".join(path))}
        if isinstance(value, Mapping):
            entries = {key: self._of(entry, (*path, str(key))) for key, entry in value.items()}
            whole = all(isinstance(key, str) for key in entries)
            return entries if whole else {_ENTRIES: [[*entry] for entry in entries.items()]}
        if isinstance(value, list | tuple):
            return [self._of(entry, (*path, str(n))) for n, entry in enumerate(value)]
        return value

    def _named(self, value: Tensor | Arriving | Equal, name: str) -> str:
        is_equal = isinstance(value, Equal)
        value = value.tensor if isinstance(value, Equal) else value
        tensor = value.buffer if isinstance(value, Arriving) else value.detach()
        part = local(tensor)
        place = (part.device, part.data_ptr(), part.dtype, part.shape, part.stride())
        first = self._names.setdefault(place, name)
        if first == name:
            assert name not in self.tensors, f"two tensors of a state are called {name}"
            self.tensors[name] = value if isinstance(value, Arriving) else part
            self.offsets[name] = begins(tensor)
            if is_equal:
                self.equal[name] = 0, num_rows(part)
        return first

    def _deal(self, replica: int, num_replicas: int) -> None:
        """Keep this replica's part of what is equal on all."""
        bytes_of = {name: _buffer(self.tensors[name]).nbytes for name in self.equal}
        total, at = sum(bytes_of.values()), 0
        edges = [total * number // num_replicas for number in (replica, replica + 1)]
        for name, (_, rows) in list(self.equal.items()):
            size = bytes_of[name]
            if size > 0:
                # The first row that begins at an edge or behind it.
                first, last = (min(max(0, -((at - edge) * rows // size)), rows) for edge in edges)
            else:
                first, last = 0, rows if replica == 0 else 0
            at += size
            tensor = self.tensors.pop(name)
            if first == last and (size > 0 or replica > 0):
                del self.equal[name], self.offsets[name]
                continue
            if last - first < rows:
                if isinstance(tensor, Arriving):
                    tensor = tensor.part(first, last)
                else:
                    tensor = tensor[first:last]
                self.offsets[name][0] += first
            self.tensors[name], self.equal[name] = tensor, (first, rows)


def _buffer(value: Tensor | Arriving) -> Tensor:
    return value.buffer if isinstance(value, Arriving) else value


def split(state: Mapping[str, Any], worker: int, replica: int = 0, num_replicas: int = 1) -> Split:
    """Divide the state of a worker: nested dicts, lists and tuples of tensors and plain values.
    Tuples become lists. What stands under `REPLICA` is named without the worker.

    Args:
        worker: its number in its replica.
        replica: of so many, among which it is divided who writes what is `Equal`.
    """
    found, own = Split(), () if worker == 0 else (f"worker_{worker}",)
    for key, value in state.items():
        found.values[key] = found._of(value, () if key == REPLICA else (*own, key))
    found._deal(replica, num_replicas)
    return found


def rebuilt(values: Any, tensor: Callable[[str], object]) -> Any:
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
        self._waits = [one.copy(one.buffer, late[name]) for name, one in arriving.items()]
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
    """Write a state without what is `equal`, with copies of its tensors in the host's memory, by
    name. Raises `OSError` where there is no room."""
    own = [name for name in state.tensors if name not in state.equal]
    _write(path, own, state.values, state, tensors)


def write_equal(path: Path, state: Split, tensors: Mapping[str, Tensor]) -> None:
    """Write the part of what is equal on all replicas that is this worker's. As `write`."""
    _write(path, list(state.equal), state.equal, state, tensors)


def _write(
    path: Path, names: Sequence[str], values: Any, state: Split, tensors: Mapping[str, Tensor]
) -> None:
    shards = {name: {"saved_offsets": state.offsets[name]} for name in names}
    head = {_VALUES: json.dumps(values), _SHARDS: json.dumps(shards)}
    weight_files.save(path, {name: tensors[name] for name in names}, head)


def read(
    files: Sequence[Path],
    others: Sequence[Sequence[Path]] = (),
    averaged: Mapping[Path, Sequence[Path]] | None = None,
) -> Any:
    """Return the state of a worker, in the host's memory. Raises errors of many kinds.

    Args:
        files: its own, and those in which its counterparts in all replicas, itself too, have
            written parts of what is equal on all.
        others: the same of the other workers of its replica, who hold the tensors that it names and
            does not hold.
        averaged: of a worker's own file, those of its counterparts in all replicas, itself too:
            their mean takes the place of each tensor of real numbers that all of them have.
    """
    with ExitStack() as stack:
        held = _opened([files, *others], averaged or {}, stack)
        return rebuilt(held[0]().values(), cache(partial(_tensor, held)))


def read_anew(
    files: Sequence[Sequence[Path]],
    place: int,
    wanted: Layout,
    averaged: Mapping[Path, Sequence[Path]] | None = None,
) -> Any:
    """Return the state of a worker whose replica had another number of workers, as `read`; None
    where the files do not tell which rows they hold: an older version has written them.

    Args:
        files: as `read`'s own, of each of them.
        place, wanted: see `dealt_anew`.
    Raises:
        errors of many kinds.
    """
    with ExitStack() as stack:
        held = _opened(files, averaged or {}, stack)
        saved = []
        for opened in held:
            values, order = opened().values(), [opened, *held]
            if LAYOUT not in values:
                return None
            tree = rebuilt(values, partial(_Part, order))
            saved.append((tree, Layout.read(values[LAYOUT])))
        return dealt_anew(saved, place, wanted)


@dataclass(frozen=True)
class _Part:
    """A tensor that one of several workers has."""

    held: "Sequence[Callable[[], _Held]]"
    name: str

    def load(self) -> Tensor:
        """See `Part`. Raises `KeyError` if nobody has it."""
        return _tensor(self.held, self.name)


def _opened(
    files: Sequence[Sequence[Path]], averaged: Mapping[Path, Sequence[Path]], stack: ExitStack
) -> "list[Callable[[], _Held]]":
    """What the files of some workers hold; each is opened when it is needed first."""
    return [cache(partial(_Held, one, averaged.get(one[0], ()), stack)) for one in files]


def _tensor(held: "Sequence[Callable[[], _Held]]", name: str) -> Tensor:
    """From the first who has it."""
    found = (opened().tensor(name) for opened in held)
    there = next((one for one in found if one is not None), None)
    if there is None:
        raise KeyError(name)
    return there


class _Held:
    """What one worker holds: its own file, and parts of what is equal on all replicas."""

    def __init__(self, paths: Sequence[Path], averaged: Sequence[Path], stack: ExitStack) -> None:
        from safetensors import safe_open  # not needed by the library

        def opened(path: Path) -> Any:
            path.open("rb").close()  # safetensors takes one that it may not open for a missing one
            return stack.enter_context(safe_open(path, "pt"))

        self._own, *equal = map(opened, paths)
        self._names = set(self._own.keys())
        self._averaged = [*map(opened, averaged)]
        self._means = self._names.intersection(*(file.keys() for file in self._averaged))
        self._parts: dict[str, list[tuple[int, int, Any]]] = {}
        """Of what is equal: the first row of each part, the number of all rows, and the file."""
        for file in equal:
            for name, (first, rows) in json.loads(file.metadata()[_VALUES]).items():
                self._parts.setdefault(name, []).append((first, rows, file))

    def values(self) -> Any:
        """See `Split.values`."""
        return json.loads(self._own.metadata()[_VALUES])

    def tensor(self, name: str) -> Tensor | None:
        """None: it is not here. Raises `ValueError` where a part of it is missing."""
        if name in self._names:
            tensor: Tensor = self._own.get_tensor(name)
            if self._averaged and name in self._means and tensor.is_floating_point():
                # In fp64 the mean of equal numbers is that number.
                total = torch.zeros_like(tensor, dtype=torch.float64)
                for file in self._averaged:
                    total += file.get_tensor(name)
                tensor.copy_(total.div_(len(self._averaged)))
            return tensor
        if name not in self._parts:
            return None
        firsts, rows, files = zip(*sorted(self._parts[name], key=itemgetter(0)), strict=True)
        parts = [file.get_tensor(name) for file in files]
        if [*accumulate(map(num_rows, parts), initial=0)] != [*firsts, rows[0]]:
            raise ValueError(f"parts of {name} are missing")
        return parts[0] if len(parts) == 1 else torch.cat(parts)
