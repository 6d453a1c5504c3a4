"""The synchronization methods: one file for each published algorithm, named in catalogue.py.

A class is imported when it is first used, so that what reads the catalogue needs no torch.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from co2.methods.catalogue import CATALOGUE

if TYPE_CHECKING:
    from co2.methods.base import Method as Method


class _Methods(Mapping[str, "type[Method]"]):
    def __getitem__(self, name: str) -> "type[Method]":
        kind: type[Method] = getattr(
            import_module(f"co2.methods.{name}"), CATALOGUE[name].class_name
        )
        return kind

    def __iter__(self) -> Iterator[str]:
        return iter(CATALOGUE)

    def __len__(self) -> int:
        return len(CATALOGUE)


METHODS: Mapping[str, "type[Method]"] = _Methods()
"""Every method's class, by name."""


def __getattr__(name: str) -> type:
    if name == "Method":
        return import_module("co2.methods.base").Method
    named = [method for method, entry in CATALOGUE.items() if entry.class_name == name]
    if not named:
        raise AttributeError(f"module 'co2.methods' has no attribute '{name}'")
    return METHODS[named[0]]
