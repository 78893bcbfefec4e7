"""Imports an object named in a table when it is first chosen, so that the table itself imports none of its rows."""

from importlib import import_module
from typing import Any


def load(target: str) -> Any:
    """Return the object `name` of "module:name"."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
