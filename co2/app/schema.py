"""From composed values to a checked `Config`: the one place where names and types are judged.

pydantic makes each value what the type of its field says. The dataclasses hold it against their
limits, also for a loop of one's own (co2/limits.py).
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from co2.config import NODES, Config
from co2.errors import ConfigError, nearest, require
from co2.limits import limits, words

RENAMED = {
    "co2_keep.kept": "co2_keep.keep_local",
    "co2_keep.injection": "co2_keep.momentum_weight",
    "train.keep_global_batch": "train.global_batch, in samples of one step",
}
"""Keys that had another name, with the one that they have now."""
PLAIN = {
    name: hint
    for name, hint in limits(Config).items()
    if name not in (*NODES, "task_config", "method_config")
}
"""The keys of a run that are single values, not groups of keys, and their types."""


def typed(
    values: Mapping[str, Any], methods: Mapping[str, type], tasks: Mapping[str, type]
) -> Config:
    """The composed values as a checked run. A key that is missing has its field's default. Raises
    `ConfigError` for an unknown key (with the nearest known one) or a wrong value.

    Args:
        values: plain and resolved: groups of keys are dictionaries. `Any`: whatever YAML can hold.
        methods, tasks: classes with a dataclass `Config`, by name.
    """
    task, method = str(values.get("task")), str(values.get("method"))
    require(task in tasks, "task", task, nearest(task, tasks))
    require(method in methods, "method", method, nearest(method, methods))
    nodes = NODES | {task: schema(tasks[task]), method: schema(methods[method])}
    _require_known(values, nodes)
    made = {name: _node(name, kind, values.get(name, {})) for name, kind in nodes.items()}
    given = {"scale": None} | {key: values[key] for key in PLAIN if key in values}
    if given.get("tag") is None:  # stands for the default
        given.pop("tag", None)
    plain = {key: _value(key, value, PLAIN[key]) for key, value in given.items()}
    return Config(task_config=made.pop(task), method_config=made.pop(method), **made, **plain)


def schema(kind: type) -> type:
    """The `Config` of a task or method."""
    own: type = kind.Config  # type: ignore[attr-defined]
    return own


def _require_known(values: Mapping[str, Any], nodes: Mapping[str, type]) -> None:
    """Raise `ConfigError` for the first key that no schema has."""
    known = {node: [own.name for own in dataclasses.fields(kind)] for node, kind in nodes.items()}
    names = {*PLAIN, *known, *(f"{node}.{key}" for node, keys in known.items() for key in keys)}
    for node, value in values.items():
        keys = value if isinstance(value, dict) else {}
        leaves = {f"{node}.{key}": own for key, own in keys.items()}
        for name, own in (leaves or {node: value}).items():
            if name not in names:
                raise ConfigError(name, _short(own), _unknown(name, known))


def _unknown(name: str, known: Mapping[str, list[str]]) -> str:
    """What is right instead of a key of this full name; `known` are the keys of each node."""
    if name in RENAMED:
        return f"has a new name: {RENAMED[name]}"
    node, _, key = name.rpartition(".")
    where = "unknown key" if not node or node in known else f"there is no {node} here"
    if same := sorted(f"{other}.{key}" for other, keys in known.items() if key in keys):
        return f"{where}; did you mean {' or '.join(same)}?"
    if node not in known:
        return f"{where}; {nearest(node or key, [*known, *PLAIN])}"
    own = [f"{node}.{other}" for other in known[node]]
    return f"{where}; {nearest(name, own)}" if own else f"{node} has no keys"


def _node(name: str, kind: type, values: Any) -> Any:
    """A group of keys as its dataclass, which checks ranges. `Any`: of this `kind`."""
    require(isinstance(values, dict), name, _short(values), "must be a group of keys")
    hints = limits(kind)
    made = {key: _value(f"{name}.{key}", value, hints[key]) for key, value in values.items()}
    try:
        return kind(**made)
    except ConfigError as error:
        raise error.under(name) from None


def _value(name: str, value: object, kind: Any) -> Any:
    """A value as a field of this type holds it. `Any`: the type may be a union, as the value's is.

    As JSON pydantic takes it strictly and yet as YAML is meant: enums are given by value, tuples as
    lists, and 1 is a float where a float is due.
    """
    if isinstance(value, int | float) and kind in (str, str | None):
        value = str(value)  # a folder's name or a tag may be a bare 12
    huge = isinstance(value, int) and abs(value) >= 2**63
    require(not huge, name, _short(value), "must be a whole number below 2⁶³")
    try:
        return TypeAdapter(kind).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError:
        names = "; python train.py --help has the names" if " name" in words(kind) else ""
        raise ConfigError(name, _short(value), f"must be {words(kind)}{names}") from None


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
