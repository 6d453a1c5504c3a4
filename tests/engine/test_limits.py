"""Every setting of every schema keeps the limits that its annotation declares."""

import math
from enum import Enum
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from co2 import limits
from co2.config import NODES
from co2.errors import ConfigError
from co2.limits import Range, choices, fits, words
from co2.methods import METHODS
from co2_measure.peers import PEERS
from tasks import TASKS

INF, NAN = math.inf, math.nan
INSIDE: dict[str, tuple[list[Any], list[Any]]] = {
    "Count": ([1, 7], [0, -1, 1.0, True, None, "1"]),
    "Whole": ([0, 7], [-1, 0.5, False]),
    "Steps": ([0, 7], [-1, 0.5, True]),
    "Share": ([0, 1, 0.5], [-1e-9, 1 + 1e-9, NAN, INF, True, "0.5"]),
    "PartShare": ([1e-12, 1], [0, 1 + 1e-9, NAN]),
    "Decay": ([0, 1 - 1e-9], [1, -1e-9, NAN]),
    "Inside": ([1e-12, 1 - 1e-9], [0, 1, NAN]),
    "Amount": ([0, 1e300], [-1e-9, INF, -INF, NAN, None]),
    "Positive": ([1e-300, 7], [0, -1, INF, NAN]),
    "Seconds": ([0, 0.5], [-1, INF, NAN]),
}
"""By type: what lies within, and what does not."""
WORDS = {
    Annotated[int, Range(1)]: "a whole number, 1 or more",
    limits.Count | None: "a whole number, 1 or more, or null",
    limits.Count | Literal["auto"]: "a whole number, 1 or more, or auto",
    limits.Share: "a number, from 0 to 1",
    limits.Decay: "a number, 0 or more and below 1",
    limits.PartShare: "a number, above 0 and at most 1",
    limits.Amount: "a finite number, 0 or more",
    limits.Seconds: "a finite number of seconds, 0 or more",
    tuple[limits.Decay, limits.Decay]: "a list of two numbers, 0 or more and below 1",
    list[limits.Count]: "a list of whole numbers, 1 or more",
    Literal["a", "b"] | None: "one of a, b, or null",
    bool: "true or false",
}
CLASSES = {name: one.Config for name, one in {**METHODS, **PEERS, **TASKS}.items()}
SCHEMAS: dict[str, Any] = {**NODES, **CLASSES}
FIELDS = [(node, name) for node, kind in SCHEMAS.items() for name in limits.limits(kind)]
ODD: list[Any] = [None, True, 0, 1, -1, 0.5, 2.5, NAN, INF, "", "typo", [], [1], (1, 2, 3), {}]


@pytest.mark.parametrize("name", INSIDE)
def test_types(name: str) -> None:
    inside, outside = INSIDE[name]
    assert [value for value in inside if not fits(value, getattr(limits, name))] == []
    assert [value for value in outside if fits(value, getattr(limits, name))] == []


@pytest.mark.parametrize("hint", WORDS, ids=str)
def test_words(hint: Any) -> None:
    assert words(hint) == WORDS[hint]


def edges(hint: Any) -> list[Any]:
    """Values of an annotation at its limits, and just beyond them."""
    found: list[Any] = []
    for kind, among in choices(hint):
        if get_origin(kind) is Literal:
            found += get_args(kind)
        elif isinstance(kind, type) and issubclass(kind, Enum):
            found += kind
        elif among is not None:
            ends = [end for end in (among.low, among.high) if math.isfinite(end)]
            near = [(end - 1, end, end + 1) for end in ends]
            if kind is float:
                near = [(math.nextafter(e, -INF), e, math.nextafter(e, INF)) for e in ends]
            found += [kind(value) for one in near for value in one]
    return found


@pytest.mark.parametrize(("node", "name"), FIELDS)
def test_a_setting_keeps_its_limits(node: str, name: str) -> None:
    """What lies outside is refused in these words; what lies within is not, but perhaps for what
    other settings are."""
    kind = SCHEMAS[node]
    hint = limits.limits(kind)[name]
    line = f"must be {words(hint)}"
    for value in (*ODD, *edges(hint)):
        try:
            kind(**{name: value})
            said = None
        except ConfigError as error:
            said = error.key, error.hint
        assert (said == (name, line)) == (not fits(value, hint)), f"{value!r}: {said}"


def test_every_number_has_a_range() -> None:
    """One that may be anything is a mistake that nobody has made yet."""
    without = [
        f"{node}.{name}"
        for node, name in FIELDS
        for kind, among in choices(limits.limits(SCHEMAS[node])[name])
        for part, own in ([(kind, among)] if not get_args(kind) else choices(get_args(kind)[0]))
        if part in (int, float) and own is None
    ]
    assert without == ["optim.milestones"], "its limits depend on the warm-up"


def test_defaults_fit() -> None:
    for kind in SCHEMAS.values():
        made = kind()
        for name, hint in limits.limits(kind).items():
            assert fits(getattr(made, name), hint)
