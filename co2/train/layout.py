"""The rows of each parameter that a worker holds, and how its state is dealt anew where a replica
has got another number of workers.

Weights and inner state lie in the files by parameter, each part with its first row. A method's
vectors have no names inside: they are what a worker holds of all trained parameters, one after the
other, once or several times. So every checkpoint says which rows those are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from co2.comm.collectives import local
from co2.train.expert_parallel import ExpertShards


@dataclass(frozen=True)
class Rows:
    """The rows of a parameter, its slices along the first axis, that a worker holds."""

    first: int
    number: int
    width: int
    """Elements of a row."""

    @property
    def numel(self) -> int:
        return self.number * self.width


@dataclass(frozen=True)
class Layout:
    """What of every parameter a worker holds."""

    rows: Mapping[str, Rows]
    """By name, in the module's order."""
    trained: Sequence[str]
    """In the order of a method's vectors."""
    averaged: Sequence[str]
    """In the order of the moving average, which also follows what no optimizer trains."""

    @classmethod
    def of(cls, module: nn.Module, optimizer: Optimizer, experts: ExpertShards) -> "Layout":
        """That of this worker."""
        params = dict(module.named_parameters())
        names = {id(param): name for name, param in params.items()}
        wanted = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
        return cls(
            {name: _rows(experts.seen_whole(name, p.detach())) for name, p in params.items()},
            [*dict.fromkeys(names[id(param)] for param in wanted)],
            [name for name, p in params.items() if p.requires_grad],
        )

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> "Layout":
        """What `values` returned. Raises `KeyError`, `TypeError`."""
        rows = {name: Rows(**one) for name, one in saved["rows"].items()}
        return cls(rows, saved["trained"], saved["averaged"])

    def values(self) -> dict[str, Any]:
        """As plain values, for a checkpoint."""
        rows = {name: asdict(one) for name, one in self.rows.items()}
        return {"rows": rows, "trained": [*self.trained], "averaged": [*self.averaged]}

    @property
    def numel(self) -> int:
        """Elements of a method's vector."""
        return sum(self.rows[name].numel for name in self.trained)

    def places(self) -> dict[str, tuple[Rows, slice]]:
        """Of the trained parameters: what a worker holds, and where in a vector it lies."""
        found, begin = {}, 0
        for name in self.trained:
            rows = self.rows[name]
            found[name] = rows, slice(begin, begin + rows.numel)
            begin += rows.numel
        return found


def _rows(whole: Tensor) -> Rows:
    part = local(whole)
    return Rows(next(iter(begins(whole)), 0), num_rows(part), part.shape[1:].numel())


def begins(whole: Tensor) -> list[int]:
    """Where in a tensor the part of it begins that this worker holds, along each axis."""
    if local(whole) is whole:
        return [0] * whole.dim()
    shard: Any = whole  # a DTensor, whose module takes half a second to import
    (chunk,) = shard.__create_chunk_list__()
    return list(chunk.offsets)


def num_rows(tensor: Tensor) -> int:
    """Its slices along the first axis; 1 of a single number."""
    return tensor.size(0) if tensor.dim() else 1


class Part(Protocol):
    """A tensor in a file of a checkpoint."""

    def load(self) -> Tensor:
        """Read it."""
        ...


Tree = Any
"""A state with a `Part` in place of every tensor: plain values, and lists and dicts of them."""
Saved = tuple[Tree, Layout]
"""What a worker saved, and its layout."""


def dealt_anew(held: Sequence[Saved], place: int, wanted: Layout) -> dict[str, Any]:
    """The state of a worker that holds other rows than those who saved it.

    Args:
        held: of all workers of a replica.
        place: the one whose values count, where they are neither of parameters nor a vector's.
        wanted: the rows that the worker holds.
    Raises:
        ValueError: not all of these rows were saved, or what a method holds is no vector.
    """
    layouts, averaged = [layout for _, layout in held], wanted.averaged

    def leaf(path: tuple[Any, ...], parts: Mapping[int, Part]) -> Tensor:
        match path:
            case ("replica", "model", name) | ("replica", "optimizer", "state", name, _):
                return _parameter(str(name), parts, layouts, wanted)
            case ("average", number) if number < len(averaged):
                return _parameter(averaged[number], parts, layouts, wanted)
            case ("method", "tensors", _) | ("method", "means", _, "buffer"):
                same = layouts[place].places() == wanted.places()
                return parts[place].load() if same else _vector(parts, layouts, wanted)
        return parts[place].load()

    def dealt(path: tuple[Any, ...], values: Mapping[int, Tree]) -> Tree:
        own = values.get(place, next(iter(values.values())))
        if isinstance(own, dict):
            keys = dict.fromkeys(key for value in values.values() for key in value)
            return {
                key: dealt((*path, key), {n: v[key] for n, v in values.items() if key in v})
                for key in keys
            }
        if isinstance(own, list):
            return [
                dealt((*path, at), {n: v[at] for n, v in values.items() if at < len(v)})
                for at in range(len(own))
            ]
        return leaf(path, values) if hasattr(own, "load") else own

    found: dict[str, Any] = dealt((), dict(enumerate(tree for tree, _ in held)))
    return found


def _parameter(
    name: str, parts: Mapping[int, Part], layouts: Sequence[Layout], wanted: Layout
) -> Tensor:
    """A parameter's rows, or those of what belongs to it; anything of another size as it is."""
    rows, found, filled = wanted.rows[name], None, None
    for number, part in parts.items():
        there = layouts[number].rows[name]
        if filled is not None and not _missing(filled, rows, there):
            continue
        tensor = part.load()
        if tensor.dim() == 0 or (tensor.size(0), tensor.numel()) != (there.number, there.numel):
            return tensor
        if found is None or filled is None:
            found = tensor.new_empty(rows.number, *tensor.shape[1:])
            filled = torch.zeros(rows.number, dtype=torch.bool)
        _copy(tensor, there, found, rows, filled)
    assert found is not None and filled is not None
    _check(name, filled)
    return found


def _vector(parts: Mapping[int, Part], layouts: Sequence[Layout], wanted: Layout) -> Tensor:
    """A vector of a method: what a worker holds of all trained parameters, once or more often."""
    if wanted.numel == 0:
        return next(iter(parts.values())).load()[:0]
    found, places = None, wanted.places()
    numbers = {name: rows.number for name, (rows, _) in places.items()}
    filled = {name: torch.zeros(number, dtype=torch.bool) for name, number in numbers.items()}
    for number, part in parts.items():
        there = layouts[number].places()
        lacks = (_missing(filled[name], rows, there[name][0]) for name, (rows, _) in places.items())
        if not any(lacks):
            continue
        tensor = part.load()
        times, odd = divmod(tensor.numel(), layouts[number].numel)
        if odd or tensor.dim() != 1:
            raise ValueError(f"{tuple(tensor.shape)} is no vector of the weights")
        if found is None:
            found = tensor.new_empty(times * wanted.numel)
        for name, (rows, place) in places.items():
            then, where = there[name]
            for source, target in zip(tensor.chunk(times), found.chunk(times), strict=True):
                cells = source[where].view(-1, then.width), target[place].view(-1, rows.width)
                _copy(cells[0], then, cells[1], rows, filled[name])
    for name, there_now in filled.items():
        _check(name, there_now)
    assert found is not None
    return found


def _copy(source: Tensor, there: Rows, target: Tensor, rows: Rows, filled: Tensor) -> None:
    """Copy the rows that both have, and note them."""
    first = max(there.first, rows.first)
    last = min(there.first + there.number, rows.first + rows.number)
    if first < last:
        own = slice(first - rows.first, last - rows.first)
        target[own].copy_(source[first - there.first : last - there.first])
        filled[own] = True


def _missing(filled: Tensor, rows: Rows, there: Rows) -> bool:
    """Whether these rows have any that are wanted and not there yet."""
    first = max(0, there.first - rows.first)
    last = max(first, there.first + there.number - rows.first)
    return not bool(filled[first:last].all())


def _check(name: str, filled: Tensor) -> None:
    if not bool(filled.all()):
        raise ValueError(f"rows of {name} are missing")
