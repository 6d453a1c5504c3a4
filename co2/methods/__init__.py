"""The synchronization methods: one file for each published algorithm, named in co2/catalogue.py."""

from importlib import import_module

from co2.catalogue import CATALOGUE
from co2.methods.base import Method

METHODS: dict[str, type[Method]] = {
    name: getattr(import_module(f"co2.methods.{name}"), entry.class_name)
    for name, entry in CATALOGUE.items()
}
globals().update({method.__name__: method for method in METHODS.values()})
