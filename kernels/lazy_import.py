"""Imports an object named in a table when it is first chosen, so that the table itself imports none of its rows."""

from importlib import import_module
from operator import attrgetter
from typing import Any


def load(target: str) -> Any:
    """Return the object `name` of "module:name"; a name may have dots, as "module:Class.method"."""
    module, _, name = target.partition(":")
    return attrgetter(name)(import_module(module))
