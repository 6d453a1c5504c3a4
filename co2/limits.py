"""Limits as types: which values a setting may have is a part of its annotation.

    @dataclass
    class Config(Limited):
        share: Share = 0.5

`Config(share=2)` is refused in one line, and `--help`, the documentation and the tests say the same
words (`words`). They need the standard library alone.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from co2.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, all of them finite."""

    low: float
    high: float = math.inf
    above: bool = False
    """Whether `low` itself is left out."""
    below: bool = False
    """Whether `high` itself is left out."""
    unit: str = ""

    def __contains__(self, value: float) -> bool:
        over = value > self.low if self.above else value >= self.low
        under = value < self.high if self.below else value <= self.high
        return over and under and math.isfinite(value)

    def __str__(self) -> str:
        low, high = f"{self.low:.10g}", f"{self.high:.10g}"
        lower = f"above {low}" if self.above else f"{low} or more"
        if self.high == math.inf:
            return lower
        if not self.above and not self.below:
            return f"from {low} to {high}"
        return f"{lower} and {f'below {high}' if self.below else f'at most {high}'}"


Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]
Steps = Annotated[int, Range(0, unit="steps")]
Share = Annotated[float, Range(0, 1)]
PartShare = Annotated[float, Range(0, 1, above=True)]
"""A share that is not nothing."""
Decay = Annotated[float, Range(0, 1, below=True)]
"""What is left of something after a step; with 1 it would never fade."""
Inside = Annotated[float, Range(0, 1, above=True, below=True)]
Amount = Annotated[float, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
Seconds = Annotated[float, Range(0, unit="seconds")]

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_COUNTS = {1: "one number", 2: "two numbers", 3: "three numbers"}


class Limited:
    """Base of the dataclasses whose fields are held against their annotations when one is made. A
    subclass with limits between fields extends `__post_init__`, which raises `ConfigError`."""

    def __post_init__(self) -> None:
        for name, hint in limits(type(self)).items():
            value = getattr(self, name)
            if not fits(value, hint):
                shown = list(value) if isinstance(value, tuple) else value
                raise ConfigError(name, shown, f"must be {words(hint)}")


def limits(config: type) -> dict[str, Any]:
    """The annotations of a dataclass's fields, by name."""
    hints = get_type_hints(config, include_extras=True)
    return {one.name: hints[one.name] for one in fields(config)}


def choices(hint: Any) -> Iterator[tuple[Any, Range | None]]:
    """The types of an annotation that may have several, each with its range."""
    if get_origin(hint) in (Union, UnionType):
        for one in get_args(hint):
            yield from choices(one)
    elif get_origin(hint) is Annotated:
        kind, *extras = get_args(hint)
        yield kind, next((one for one in extras if isinstance(one, Range)), None)
    else:
        yield hint, None


def fits(value: object, hint: Any) -> bool:
    """Whether a value is of an annotation's type and within its limits."""
    return any(_fits(value, kind, among) for kind, among in choices(hint))


def _fits(value: object, kind: Any, among: Range | None) -> bool:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in args
    if origin in (tuple, list):
        if not isinstance(value, tuple | list):
            return False
        open_end = origin is list or ... in args
        kinds = [args[0]] * len(value) if open_end else args
        return len(kinds) == len(value) and all(map(fits, value, kinds))
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, int | float if kind is float else int):
            return False
        return among is None or value in among
    return kind is Any or isinstance(value, kind)


def words(hint: Any) -> str:
    """What a field of this annotation takes."""
    return ", or ".join(_words(kind, among) for kind, among in choices(hint))


def _words(kind: Any, among: Range | None) -> str:
    args = get_args(kind)
    if kind is NoneType:
        return "null"
    if get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
        names = [str(one) for one in args] or [one.value for one in kind]
        return f"one of {', '.join(names)}" if len(names) > 1 else names[0]
    if get_origin(kind) in (tuple, list):
        if get_origin(kind) is list or ... in args:
            return f"a list of {words(args[0]).removeprefix('a ').replace('number', 'numbers', 1)}"
        (_, among), *_ = choices(args[0])
        return f"a list of {_COUNTS[len(args)]}" + (f", {among}" if among else "")
    if among is None:
        return _KINDS[kind]
    name = "a finite number" if kind is float and among.high == math.inf else _KINDS[kind]
    return f"{name}{among.unit and f' of {among.unit}'}, {among}"
