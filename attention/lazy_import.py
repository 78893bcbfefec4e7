"""Imports objects that tables of choices name when they are first chosen, so that a table needs none of its rows."""

from importlib import import_module
from typing import Any


def load(target: str) -> Any:
    """Return the object `name` of "module:name"."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
