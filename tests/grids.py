"""Grids, which repeat a test for other methods, sizes or strategies.

`make test` runs the telling cases of each: one for every way in which the code treats what varies.
`make test-slow` runs the others.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

Item = TypeVar("Item")
OF_A_KIND = ("allreduce", "co2", "co2_keep", "streaming_diloco", "desloc", "zero_one_adam")
"""A method of each kind: no rounds; rounds whose means come late, and that keep local progress;
means of fragments; means of an inner Adam's moments; an Adam of its own."""


def grid(cases: Iterable[Any], telling: Callable[[Any], bool], one: bool = False) -> list[Any]:
    """Values for `pytest.mark.parametrize`, of which those that are not telling are slow.

    Args:
        one: a tuple is the value of a single argument.
    """
    values = []
    for case in cases:
        parts = case if isinstance(case, tuple) and not one else (case,)
        values.append(pytest.param(*parts, marks=() if telling(case) else pytest.mark.slow))
    return values


def nonempty(items: Iterable[Item]) -> list[Item]:
    """What a test goes through: one that went through nothing could not fail."""
    found = list(items)
    assert found, "nothing to test"
    return found
