"""From composed values to a checked `Config`: the one place where names and types are judged.

pydantic makes each value what the type of its field says. The dataclasses hold it against their
limits, also for a loop of one's own (co2/limits.py).
"""

import dataclasses
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from co2.config import NODES, Config
from co2.errors import ConfigError, nearest, require
from co2.limits import limits, words

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
    given = {"scale": None} | {key: values[key] for key in (*PLAIN, *NODES) if key in values}
    if given.get("tag") is None:  # stands for the default
        given.pop("tag", None)
    config: Config = _made(Config, given | {"task_config": None, "method_config": None})
    config.task_config = _made(nodes[task], values.get(task, {}), task)
    config.method_config = _made(nodes[method], values.get(method, {}), method)
    return config


def defaults(kind: type) -> dict[str, Any]:
    """The defaults of a dataclass as they are declared: `__post_init__` may derive one from other
    settings. `Any`: whatever a field can hold."""
    found = {}
    for own in dataclasses.fields(kind):
        if own.default is not dataclasses.MISSING:
            found[own.name] = own.default
        elif own.default_factory is not dataclasses.MISSING:
            found[own.name] = own.default_factory()
    return found


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
    node, _, key = name.rpartition(".")
    where = "unknown key" if not node or node in known else f"there is no {node} here"
    if same := sorted(f"{other}.{key}" for other, keys in known.items() if key in keys):
        return f"{where}; did you mean {' or '.join(same)}?"
    if node not in known:
        return f"{where}; {nearest(node or key, [*known, *PLAIN])}"
    own = [f"{node}.{other}" for other in known[node]]
    return f"{where}; {nearest(name, own)}" if own else f"{node} has no keys"


def _made(kind: type, values: Any, node: str = "") -> Any:
    """The values of a group of keys as its dataclass, which checks ranges. `Any`: of this `kind`.

    As JSON pydantic takes them strictly and yet as YAML is meant: enums are given by value, tuples
    as lists, and 1 is a float where a float is due.
    """
    text = json.dumps(_as_yaml_is_meant(kind, values, node), default=str)
    try:
        return _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
    path, hint = list(first["loc"]), kind
    if isinstance(own := first.get("ctx", {}).get("error"), ConfigError):
        node = node or ".".join(map(str, path))
        raise (own.under(node) if node else own) from None
    while dataclasses.is_dataclass(hint):
        key = str(path.pop(0))
        node, hint, values = f"{node}.{key}".strip("."), limits(hint)[key], values[key]
    raise ConfigError(node, _short(values), f"must be {words(hint)}")


def _as_yaml_is_meant(kind: type, values: Any, node: str) -> dict[str, Any]:
    """The values of a group of keys, with a text for a bare number where a text is due. `Any`: not
    checked yet."""
    if not isinstance(values, dict):
        raise ConfigError(node, _short(values), "must be a group of keys")
    hints, given = limits(kind), dict(values)
    for key, value in values.items():
        if dataclasses.is_dataclass(hints[key]):
            given[key] = _as_yaml_is_meant(hints[key], value, key)
        elif isinstance(value, int) and abs(value) >= 2**63:
            name = f"{node}.{key}".strip(".")
            raise ConfigError(name, _short(value), "must be a whole number below 2⁶³")
        elif isinstance(value, int | float) and hints[key] in (str, str | None):
            given[key] = str(value)  # a folder's name or a tag may be a bare 12
    return given


_adapter = lru_cache(maxsize=None)(TypeAdapter)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
