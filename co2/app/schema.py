"""From composed values to a checked `Config`: the one place where names and types are judged.

pydantic holds the values against the dataclasses of `co2/config.py` and those of the chosen task
and method. The dataclasses themselves check ranges, so that a loop of one's own, which has no
configuration files, gets the same errors.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from co2.config import NODES, Config
from co2.errors import ConfigError, nearest, require

RENAMED = {
    "co2_keep.kept": "co2_keep.keep_local",
    "co2_keep.injection": "co2_keep.momentum_weight",
    "train.keep_global_batch": "train.global_batch, in samples of one step",
}
"""Keys that had another name, with the one that they have now."""

# Strict: a truth value is no whole number, and a text is no number. The nodes inherit this from the
# document, because dataclasses of the standard library bring no configuration of pydantic's.
_STRICT = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
_CHOSEN = ("task_config", "method_config")
_PLAIN = {
    field.name: field
    for field in dataclasses.fields(Config)
    if field.name not in (*NODES, *_CHOSEN)
}
"""The fields of a run that are single values, not groups of keys."""
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_COUNTS = {1: "one number", 2: "two numbers", 3: "three numbers"}


def typed(
    values: Mapping[str, Any], methods: Mapping[str, type], tasks: Mapping[str, type]
) -> Config:
    """The composed values as a checked run.

    Args:
        values: plain and resolved: groups of keys are dictionaries. `Any`: whatever YAML can hold.
            A `tag` of None stands for the default.
        methods, tasks: classes with a dataclass `Config`, by name.
    Raises:
        ConfigError: an unknown key (with the nearest known one), a missing one or a wrong value.
    """
    task, method = str(values.get("task")), str(values.get("method"))
    require(task in tasks, "task", task, nearest(task, tasks))
    require(method in methods, "method", method, nearest(method, methods))
    own = {task: _schema(tasks[task]), method: _schema(methods[method])}
    nodes = NODES | own
    given = {key: value for key, value in values.items() if (key, value) != ("tag", None)}
    for key in (key for key in given if key not in _PLAIN and key not in nodes):
        hint = "unknown key; " + nearest(key, _PLAIN | nodes)
        if key in methods:
            hint = f"the chosen method is {method}, whose keys are {method}.*"
        raise ConfigError(key, _short(given[key]), hint)
    for name, schema in nodes.items():
        _require_every_key(name, schema, given.get(name))
    try:
        document = _document(tuple(own.items())).model_validate_json(_json(given, nodes))
    except ValidationError as error:
        raise _refusal(error, given, nodes) from None
    checked = dict(document)
    config = {"task_config": checked.pop(task), "method_config": checked.pop(method)}
    return Config(**config, **checked)


def unknown(key: str, known: typing.Iterable[str]) -> str:
    """What is right instead of a key that no schema has."""
    if key in RENAMED:
        return f"has a new name: {RENAMED[key]}"
    names = list(known)
    return (
        "unknown key; " + nearest(key, names) if names else f"{key.partition('.')[0]} has no keys"
    )


def _schema(kind: type) -> type:
    """The `Config` of a task or method."""
    schema: type = kind.Config  # type: ignore[attr-defined]
    return schema


@cache
def _document(own: tuple[tuple[str, type], ...]) -> type[BaseModel]:
    """The model of a whole configuration, for a task and a method."""
    hints = typing.get_type_hints(Config)
    # `Any`: create_model takes a pair of type and default for each field.
    fields: dict[str, Any] = {name: (schema, ...) for name, schema in (NODES | dict(own)).items()}
    for name, field in _PLAIN.items():
        required = field.default is dataclasses.MISSING
        fields[name] = (hints[name], ... if required else field.default)
    return create_model("Document", __config__=_STRICT, **fields)


def _json(given: Mapping[str, Any], nodes: Mapping[str, type]) -> str:
    """The values as JSON, which pydantic reads as YAML is meant even where it is strict.

    Enums are given by value, tuples as lists, and 1 is a float where a float is due. YAML and Hydra
    read a bare 12 as a number, which may be a folder's name or a tag: where a field takes nothing
    but texts, it becomes one.
    """

    def with_texts(values: Mapping[str, Any], schema: type) -> dict[str, Any]:
        hints = typing.get_type_hints(schema)
        return {
            key: str(value)
            if isinstance(value, int | float) and _choices(hints.get(key)) == (str,)
            else value
            for key, value in values.items()
        }

    texts = with_texts(given, Config)
    return json.dumps(
        {
            key: with_texts(value, nodes[key])
            if key in nodes and isinstance(value, dict)
            else value
            for key, value in texts.items()
        }
    )


def _require_every_key(name: str, schema: type, values: object) -> None:
    """Raise `ConfigError` for a missing key: conf/ is the only place of hyper-parameters.

    The schemas' own defaults are for those who use the library without conf/.
    """
    if isinstance(values, dict):
        for field in dataclasses.fields(schema):
            hint = "is missing; conf/ has a value for it, so leave it"
            key = f"{name}.{field.name}"
            require(field.name in values, key, "", hint)
            value = values[field.name]
            huge = isinstance(value, int) and abs(value) >= 2**63
            require(not huge, key, _short(value), "must be a whole number below 2⁶³")


def _refusal(
    error: ValidationError, given: Mapping[str, Any], nodes: Mapping[str, type]
) -> ConfigError:
    """The first of pydantic's errors as ours; an unknown key comes before a wrong value."""
    errors = error.errors(include_url=False)
    first = next((found for found in errors if found["type"] in _UNKNOWN), errors[0])
    node, *path = map(str, first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):  # a range, judged by the dataclass itself
        return cause.under(node) if node in nodes else cause
    value = given.get(node)
    if node not in nodes:
        return ConfigError(node, _short(value), _expected(typing.get_type_hints(Config)[node]))
    if not path:
        hint = str(cause) if cause is not None else "must be a group of keys"
        return ConfigError(node, _short(value), hint)
    key, hints = f"{node}.{path[0]}", typing.get_type_hints(nodes[node])
    assert isinstance(value, dict), "pydantic went into it"
    if first["type"] in _UNKNOWN:
        hint = unknown(key, [f"{node}.{name}" for name in hints])
    else:
        hint = _expected(hints[path[0]])
    return ConfigError(key, _short(value[path[0]]), hint)


def _choices(kind: object) -> tuple[object, ...]:
    """The types that a field takes, apart from None."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return tuple(choice for choice in typing.get_args(kind) if choice is not types.NoneType)
    return (kind,)


def _expected(kind: object) -> str:
    """What a field takes, in words."""
    choices = _choices(kind)
    if len(choices) > 1:
        number = "a number" if float in choices else "a whole number"
        return f"must be {number} or one of the names that conf/ lists beside it"
    (choice,) = choices
    if isinstance(choice, type) and issubclass(choice, Enum):
        words = f"one of {', '.join(option.value for option in choice)}"
    elif typing.get_origin(choice) in (list, tuple):
        kinds = typing.get_args(choice)
        any_number = typing.get_origin(choice) is list or ... in kinds
        words = "a list of " + ("whole numbers" if any_number else _COUNTS[len(kinds)])
    else:
        assert isinstance(choice, type)
        words = _WORDS.get(choice, choice.__name__)
    return f"must be {words}" if choice is kind else f"must be {words}, or null"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
